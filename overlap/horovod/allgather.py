"""Allgather by name: every rank's rows, one rank after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from overlap.horovod.allreduce import grouped_allreduce
from overlap.horovod.controller.enqueue import enqueue, operation_name, runtime
from overlap.horovod.controller.operation import Group, Only, Operation, Pending
from overlap.horovod.controller.request import Kind, Request, Response
from overlap.horovod.reduction import Average
from overlap.horovod.tensors import plain, spec_of, tensors_of
from overlap.job.process_set import ProcessSet, global_process_set
from overlap.transport.communicator import Work
from overlap.transport.operation import all_gather

__all__ = ["Allgather", "allgather", "allgather_async", "grouped_allgather", "grouped_allgather_async"]


class Allgather(Operation):
    """The operation: every rank's rows, one rank after the other."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = list(tensors)
        self._buffers = [plain(tensor) for tensor in tensors]
        self._outputs: list[torch.Tensor] = []
        self.rows: tuple[tuple[int, ...], ...] = ()
        """How many rows came from each rank, for every tensor; known with the result."""

    def start(self, response: Response, group: Group) -> list[Work]:
        self.rows = response.rows
        works = []
        for buffer, rows in zip(self._buffers, response.rows, strict=True):
            output = buffer.new_empty((sum(rows), *buffer.shape[1:]))
            row_numel = buffer.shape[1:].numel()
            counts = [count * row_numel for count in rows]
            works.append(group.members.start(all_gather(buffer, output, counts=counts, label=response.request.name)))
            self._outputs.append(output)
        return works

    def result(self) -> list[torch.Tensor]:
        return [output.to(tensor.device) for output, tensor in zip(self._outputs, self._tensors, strict=True)]


class _Call(NamedTuple):
    name: str
    process_set: ProcessSet

    def start(self, tensors: Sequence[torch.Tensor], *, single: bool = False) -> Pending:
        def prepare(name: str, group: Group) -> tuple[Request, Operation]:
            members = [tensor if tensor.dim() else tensor.reshape(1) for tensor in tensors_of("allgather", tensors)]
            specs = tuple(spec_of(tensor) for tensor in members)
            operation = Allgather(members)
            return Request(Kind.ALLGATHER, name, group.number, specs), Only(operation) if single else operation

        return enqueue(Kind.ALLGATHER, self.name, self.process_set, prepare)


def _call(name: str | None, process_set: ProcessSet, *, group: bool = False) -> _Call:
    return _Call(operation_name(Kind.ALLGATHER, name, process_set, group=group), process_set)


class _Differentiable(torch.autograd.Function):
    """As in Horovod, a rank's gradient is the average over ranks of what each of them has for its rows."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        pending = call.start(tensors)
        gathered = pending.wait()
        assert isinstance(pending.operation, Allgather)
        me = runtime().group(call.process_set).index
        ctx.call, ctx.shapes = call, [tensor.shape for tensor in tensors]
        ctx.places = [(sum(rows[:me]), rows[me]) for rows in pending.operation.rows]
        return tuple(gathered)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        wanted = [index for index, needed in enumerate(ctx.needs_input_grad[1:]) if needed]
        call: _Call = ctx.call
        reduced = grouped_allreduce(
            [gradients[index] for index in wanted],
            op=Average,
            name=f"allgather {call.name}.backward",
            process_set=call.process_set,
        )
        parts: list[torch.Tensor | None] = [None] * len(ctx.shapes)
        for index, gradient in zip(wanted, reduced, strict=True):
            parts[index] = gradient.narrow(0, *ctx.places[index]).reshape(ctx.shapes[index])
        return (None, *parts)


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """A new tensor: every rank's `tensor`, one after the other along the first dimension, which may differ.

    A scalar counts as one row. Differentiable: the gradient of a rank's rows is averaged over ranks, as in Horovod. On
    every rank of `process_set`; raises :class:`Mismatch` on all of them when other dimensions or dtypes differ.
    """
    (gathered,) = _Differentiable.apply(_call(name, process_set), tensor)
    return gathered


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """As :func:`allgather`, not differentiable; returns at once a handle for ``poll`` and ``synchronize``."""
    return runtime().handles.give(_call(name, process_set).start([tensor], single=True))


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """As :func:`allgather` of each tensor, as one operation under one name."""
    return list(_Differentiable.apply(_call(name, process_set, group=True), *tensors))


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """As :func:`allgather_async` of a group; ``synchronize`` returns a list."""
    return runtime().handles.give(_call(name, process_set, group=True).start(tensors))
