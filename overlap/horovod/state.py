"""The root's model and optimizer on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from overlap.horovod.broadcast import broadcast_group
from overlap.horovod.controller.enqueue import operation_name, refuse
from overlap.horovod.controller.errors import Mismatch
from overlap.horovod.controller.request import Kind
from overlap.horovod.job import rank
from overlap.horovod.objects import allgather_object, broadcast_object
from overlap.job.process_set import global_process_set
from overlap.transport.broadcast import plant, uproot

__all__ = ["broadcast_optimizer_state", "broadcast_parameters"]


def broadcast_parameters(params: Mapping[str, Any] | Iterable[Any], root_rank: int) -> None:
    """Overwrite parameters with those of `root_rank`, in place. On every rank.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()`` or ``model.parameters()``. Entries that are no tensors
            are left alone.

    Raises :class:`Mismatch` on every rank, with the parameter's name, where names, shapes or dtypes differ between ranks,
    and ``ValueError`` for anything else than these.
    """
    try:
        tensors = _named_tensors(params)
    except ValueError as error:
        raise refuse(Kind.BROADCAST, operation_name(Kind.BROADCAST, None, global_process_set), error) from None
    broadcast_group([value.data for _, value in tensors], [name for name, _ in tensors], root_rank)


def _named_tensors(params: Any) -> list[tuple[str, torch.Tensor]]:
    if isinstance(params, Mapping):
        pairs: list[Any] = sorted(params.items(), key=lambda pair: str(pair[0]))
    elif isinstance(params, Iterable) and not isinstance(params, torch.Tensor | str):
        pairs = [item if isinstance(item, tuple) else ("", item) for item in params]
    else:
        raise ValueError(f"params should be a state_dict or a list of parameters and is a {type(params).__name__}")
    if any(len(pair) != 2 for pair in pairs):
        raise ValueError("params should be a state_dict, parameters, or pairs (name, parameter)")
    return [(str(name), value) for name, value in pairs if isinstance(value, torch.Tensor)]


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Give every rank the hyper-parameters and the state of `root_rank`, whatever it had before. On every rank.

    Follows the root's structure and never takes a step, which would change parameters; so it works for optimizers that
    have no state yet on some ranks, and for LBFGS. A distributed optimizer keeps its sharding.

    Args:
        model: what Horovod needs to take that step; accepted and not needed.

    Raises :class:`Mismatch` on every rank where parameter groups differ between ranks, or a rank gives no optimizer (there
    ``TypeError``).
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        wrong = TypeError(f"optimizer should be a torch.optim.Optimizer and is {type(optimizer).__name__}")
        name = operation_name(Kind.ALLGATHER, None, global_process_set)
        raise refuse(Kind.ALLGATHER, f"{name} (objects)", wrong)
    sizes = allgather_object([len(group["params"]) for group in optimizer.param_groups])
    for number, found in enumerate(sizes):
        if found != sizes[0]:
            raise Mismatch(
                f"broadcast_optimizer_state: parameters per group differ between ranks: {sizes[0]} on rank 0 and {found} "
                f"on rank {number}"
            )
    tensors: list[torch.Tensor] = []
    root = rank() == root_rank
    structure = broadcast_object(uproot(optimizer.state_dict(), tensors) if root else None, root_rank)
    if not root:
        loaded = plant(structure, tensors)
    broadcast_group(tensors, [str(index) for index in range(len(tensors))], root_rank)
    if not root:
        optimizer.load_state_dict(loaded)
