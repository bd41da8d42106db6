"""Finds other wrappers around a model that split the batch or average gradients, which would do our work twice.

Or an optimizer that splits parameters between ranks.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from overlap.core.gates.holders import holders

__all__ = ["other_sharder", "other_wrapper"]

_SHARDERS = ("ZeroRedundancyOptimizer", "OSS")

_DATA_PARALLEL = (
    "the model is in torch.nn.DataParallel, which trains on several devices from one process: dear needs one process per "
    "device. Hand over model.module and start them by `dearrun -np N python script.py`"
)
_DDP = (
    "the model is in DistributedDataParallel, which averages its gradients already: use one of both. Hand over the model "
    "before it is wrapped (model.module), and take DistributedDataParallel away. Hugging Face's Trainer and Accelerate put "
    "it there by themselves: take DearTrainer of dear.integrations.transformers, or Accelerator of "
    "dear.integrations.accelerate, and give it the optimizer as it was before it was distributed"
)


def other_sharder(optimizer: torch.optim.Optimizer) -> str | None:
    """A message for the user where `optimizer` splits parameters between ranks by itself."""
    name = next((base.__name__ for base in type(optimizer).__mro__ if base.__name__ in _SHARDERS), None)
    if name is None:
        return None
    return (
        f"{name} updates a part of the parameters on each rank and communicates in step(), which is what a "
        f"DistributedOptimizer does itself: leave {name} out, and hand over the optimizer that it was told to make, such "
        "as torch.optim.AdamW(model.parameters()). dear and oss keep 1/P of its state on each rank"
    )


def other_wrapper(model: torch.nn.Module | None, parameter: torch.Tensor) -> str | None:
    """A message for the user where `model`, a part of it, or a module around `parameter` is such a wrapper."""
    around: Iterable[torch.nn.Module] = ()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        around = holders([parameter])  # also what the script has put around the model since
    for module in (*(() if model is None else model.modules()), *around):
        if isinstance(module, torch.nn.DataParallel):
            return _DATA_PARALLEL
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            return _DDP
    return None
