"""Allreduce of sparse tensors by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from comm_core import ReduceOp
from overlap.horovod.allgather import allgather_async
from overlap.horovod.controller.enqueue import runtime, telling_others
from overlap.horovod.controller.errors import Mismatch
from overlap.horovod.controller.request import Kind
from overlap.horovod.reduction import resolve
from overlap.horovod.synchronization import synchronize
from overlap.job.process_set import ProcessSet, global_process_set

__all__ = ["sparse_allreduce_async"]


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: Any, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Sum or average a sparse COO tensor over the ranks: indices and values of all are gathered.

    Returns, as in Horovod, a function: calling it waits, and gives an uncoalesced sparse tensor of the same shape. On
    every rank of `process_set`. Raises ``ValueError`` for another layout or another `op`; the function raises
    :class:`Mismatch` on every rank where shapes differ.
    """
    names = [f"{name}.{part}" for part in ("indices", "values", "shape")]
    with ExitStack() as refused:  # of all of them, as the others wait for them
        for part in names:
            refused.enter_context(telling_others(Kind.ALLGATHER, part, process_set))
        wanted = _checked(tensor, op)
    source = tensor.detach()
    indices = allgather_async(source._indices().t().contiguous(), names[0], process_set)
    values = allgather_async(source._values(), names[1], process_set)
    shapes = allgather_async(torch.tensor([source.shape], dtype=torch.int64, device="cpu"), names[2], process_set)
    size = runtime().group(process_set).size

    def result() -> torch.Tensor:
        _compare(name, synchronize(shapes).tolist())
        found = synchronize(values)
        if wanted is ReduceOp.AVG:
            found = found / size
        return torch.sparse_coo_tensor(synchronize(indices).t(), found, source.shape, check_invariants=False)

    return result


def _checked(tensor: torch.Tensor, op: Any) -> ReduceOp:
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.sparse_coo:
        kind = tensor.layout if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise ValueError(
            f"sparse_allreduce_async takes a sparse COO tensor and was given {kind}; see allreduce_async()"
        )
    wanted = resolve(op)
    if wanted not in (ReduceOp.SUM, ReduceOp.AVG):
        raise ValueError(f"sparse tensors can be summed or averaged; op is {wanted.name}")
    return wanted


def _compare(name: str, shapes: Sequence[Sequence[int]]) -> None:
    """Indices of a larger tensor would lie outside of a smaller one."""
    for number, shape in enumerate(shapes):
        if shape != shapes[0]:
            raise Mismatch(
                f"sparse_allreduce_async {name!r}: shapes differ between ranks: {tuple(shapes[0])} on the first rank of "
                f"the process set and {tuple(shape)} on rank {number} of it"
            )
