"""Reducescatter by name: each rank's rows of a reduction."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from comm_core import ReduceOp
from overlap.horovod.allgather import grouped_allgather
from overlap.horovod.controller.enqueue import operation_name, runtime
from overlap.horovod.controller.operation import Group, Operation, Pending
from overlap.horovod.controller.request import Kind, Response
from overlap.horovod.reduction import Average, ReductionCall, Sum, divide_, on_the_wire, wire_dtype
from overlap.horovod.tensors import own_copy, plain, scale_
from overlap.job.process_set import ProcessSet, global_process_set
from overlap.transport.checks import balanced_split
from overlap.transport.communicator import Work
from overlap.transport.compression import Compression, Compressor
from overlap.transport.operation import reduce_scatter

__all__ = ["grouped_reducescatter", "grouped_reducescatter_async", "reducescatter", "reducescatter_async"]


class _ReduceScatter(Operation):
    """Reduces tensors and leaves each rank its rows; the first ranks get one more where rows do not divide."""

    def __init__(self, tensors: Sequence[torch.Tensor], op: ReduceOp, prescale: float, postscale: float) -> None:
        self._tensors, self._op = list(tensors), op
        self._prescale, self._postscale = prescale, postscale
        self._buffers = [plain(tensor) if prescale == 1.0 else own_copy(tensor) for tensor in tensors]
        self._outputs: list[torch.Tensor] = []
        self._divisors: list[int] = []

    def start(self, response: Response, group: Group) -> list[Work]:
        works = []
        for staged in self._buffers:
            scale_(staged, self._prescale)
            buffer = staged.to(wire_dtype(staged.dtype, self._op))
            rows = balanced_split(buffer.shape[0], group.size)
            row_numel = buffer.shape[1:].numel()
            output = buffer.new_empty((rows[group.index], *buffer.shape[1:]))
            counts = [count * row_numel for count in rows]
            op, divisor = on_the_wire(self._op, buffer.dtype, group.size)
            name = response.request.name
            works.append(group.members.start(reduce_scatter(buffer, output, op, counts=counts, label=name)))
            self._outputs.append(output)
            self._divisors.append(divisor)
        return works

    def result(self) -> list[torch.Tensor]:
        for output, divisor in zip(self._outputs, self._divisors, strict=True):
            divide_(output, divisor)
            scale_(output, self._postscale)
        return [
            output.to(tensor.device, tensor.dtype) for output, tensor in zip(self._outputs, self._tensors, strict=True)
        ]


class _Call(ReductionCall):
    __slots__ = ()

    def start(self, tensors: Iterable[torch.Tensor], *, single: bool = False) -> Pending:
        return self.enqueue(tensors, _ReduceScatter, single=single)


def _call(
    name: str | None,
    op: Any,
    process_set: ProcessSet,
    prescale: float,
    postscale: float,
    *,
    group: bool = False,
) -> _Call:
    found = operation_name(Kind.REDUCESCATTER, name, process_set, group=group)
    return _Call(Kind.REDUCESCATTER, found, op, None, prescale, postscale, process_set)


class _Differentiable(torch.autograd.Function):
    """The gradients of all ranks' rows, one rank after the other; as in Horovod, of a sum times the number of ranks."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        return tuple(call.start(tensors).wait())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: _Call = ctx.call
        factor = call.prescale * call.postscale
        if call.differentiable_op() is Sum:
            factor *= runtime().group(call.process_set).size
        wanted = [index for index, needed in enumerate(ctx.needs_input_grad[1:]) if needed]
        gathered = grouped_allgather(
            [gradients[index] * factor for index in wanted],
            name=f"reducescatter {call.name}.backward",
            process_set=call.process_set,
        )
        parts: list[torch.Tensor | None] = [None] * len(gradients)
        for index, gradient in zip(wanted, gathered, strict=True):
            parts[index] = gradient
        return (None, *parts)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """A new tensor: this rank's rows of the reduction of every rank's `tensor`. On every rank of `process_set`.

    Rows are divided evenly; the first ranks get one more where they do not divide. Arguments and errors as of
    ``allreduce``. Differentiable for Sum and Average: the backward pass gathers the gradients of all rows; as in
    Horovod, those of a Sum are multiplied by the number of ranks.
    """
    call = _call(name, op, process_set, prescale_factor, postscale_factor)
    ((compressed, context),) = call.compress(compression, [tensor])
    (reduced,) = _Differentiable.apply(call, compressed)
    return compression.decompress(reduced, context)


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """As :func:`reducescatter`, not differentiable; returns at once a handle for ``poll`` and ``synchronize``."""
    call = _call(name, op, process_set, prescale_factor, postscale_factor)
    return runtime().handles.give(call.start([tensor], single=True))


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """As :func:`reducescatter` of each tensor, as one operation under one name."""
    call = _call(name, op, process_set, prescale_factor, postscale_factor, group=True)
    pairs = call.compress(compression, tensors)
    reduced = _Differentiable.apply(call, *(compressed for compressed, _ in pairs))
    return [compression.decompress(tensor, context) for tensor, (_, context) in zip(reduced, pairs, strict=True)]


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """As :func:`reducescatter_async` of a group; ``synchronize`` returns a list."""
    call = _call(name, op, process_set, prescale_factor, postscale_factor, group=True)
    return runtime().handles.give(call.start(tensors))
