"""Alltoall by name: rows from every rank to every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from overlap.horovod.controller.enqueue import enqueue, operation_name, runtime
from overlap.horovod.controller.operation import Group, Operation, Pending
from overlap.horovod.controller.request import Kind, Request, Response
from overlap.horovod.tensors import plain, spec_of, tensors_of
from overlap.job.process_set import ProcessSet, global_process_set
from overlap.transport.communicator import Work
from overlap.transport.operation import all_to_all

__all__ = ["alltoall", "alltoall_async"]

_Splits = torch.Tensor | Sequence[int] | None


class _Alltoall(Operation):
    """Rows for every rank, and rows from every rank."""

    def __init__(self, tensor: torch.Tensor, splits: _Splits) -> None:
        self._tensor, self._buffer, self._splits = tensor, plain(tensor), splits
        self._output = self._buffer
        self._received: list[int] = []

    def start(self, response: Response, group: Group) -> list[Work]:
        me = group.index
        row_numel = self._buffer.shape[1:].numel()
        self._received = [splits[me] for splits in response.splits]
        self._output = self._buffer.new_empty((sum(self._received), *self._buffer.shape[1:]))
        counts = {
            "send_counts": [count * row_numel for count in response.splits[me]],
            "recv_counts": [count * row_numel for count in self._received],
        }
        return [group.members.start(all_to_all(self._buffer, self._output, **counts, label=response.request.name))]

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows, and how many of them came from each rank, in the form of the caller's splits."""
        given = self._splits
        dtype, device = (given.dtype, given.device) if isinstance(given, torch.Tensor) else (torch.int32, "cpu")
        return self._output.to(self._tensor.device), torch.tensor(self._received, dtype=dtype, device=device)


def _rows(tensor: torch.Tensor, splits: _Splits, size: int) -> tuple[int, ...]:
    if not tensor.dim():
        raise ValueError("alltoall divides a tensor along its first dimension and was given a scalar")
    if splits is None:
        if tensor.shape[0] % size:
            raise ValueError(f"{tensor.shape[0]} rows do not divide by {size} ranks; pass splits")
        return (tensor.shape[0] // size,) * size
    if isinstance(splits, torch.Tensor) and (splits.dtype.is_floating_point or splits.dim() != 1):
        raise ValueError(f"splits should be whole numbers in one dimension and are {splits.dtype}, {splits.dim()}-d")
    rows = tuple(int(count) for count in splits)
    if len(rows) != size or any(count < 0 for count in rows):
        raise ValueError(f"splits should be {size} numbers of rows, one for each rank, and are {list(rows)}")
    if sum(rows) != tensor.shape[0]:
        raise ValueError(f"splits {list(rows)} add up to {sum(rows)} rows, the tensor has {tensor.shape[0]}")
    return rows


class _Call(NamedTuple):
    splits: Any
    name: str
    process_set: ProcessSet

    def start(self, tensor: torch.Tensor) -> Pending:
        def prepare(name: str, group: Group) -> tuple[Request, Operation]:
            (member,) = tensors_of("alltoall", [tensor])
            rows = _rows(member, self.splits, group.size)
            request = Request(Kind.ALLTOALL, name, group.number, (spec_of(member),), splits=rows)
            return request, _Alltoall(member, self.splits)

        return enqueue(Kind.ALLTOALL, self.name, self.process_set, prepare)


class _Differentiable(torch.autograd.Function):
    """Gradients go back the way the rows came."""

    @staticmethod
    def forward(ctx: Any, call: _Call, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output, received = call.start(tensor).wait()
        ctx.back = call._replace(splits=received, name=f"{call.name}.backward")
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradient, _ = _Differentiable.apply(ctx.back, gradients[0])
        return None, gradient


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """A new tensor: the rows that every rank has sent to this one, in rank order. On every rank of `process_set`.

    Args:
        tensor: divided along its first dimension; the others, and the dtype, have to be the same on all ranks.
        splits: how many rows go to each rank; without it, the same number to each.

    Returns the rows and, when `splits` were given, also how many of them came from each rank. Differentiable: gradients
    go back the way the rows came.
    """
    call = _Call(splits, operation_name(Kind.ALLTOALL, name, process_set), process_set)
    output, received = _Differentiable.apply(call, tensor)
    return output if splits is None else (output, received)


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As :func:`alltoall`, not differentiable; ``synchronize`` always returns the pair of rows and their numbers."""
    call = _Call(splits, operation_name(Kind.ALLTOALL, name, process_set), process_set)
    return runtime().handles.give(call.start(tensor))
