"""Allreduce by name: sums, averages and other reductions of every rank's tensor."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch

from comm_core import ReduceOp
from overlap.horovod.controller.enqueue import operation_name, runtime
from overlap.horovod.controller.operation import Group, Nothing, Operation, Pending
from overlap.horovod.controller.request import Kind, Response, TensorSpec
from overlap.horovod.reduction import Batch, ReductionCall, batches, divide_, on_the_wire
from overlap.horovod.tensors import dtype_of, own_copy, plain, put_back, scale_
from overlap.job.process_set import ProcessSet, global_process_set
from overlap.transport.communicator import Work
from overlap.transport.compression import Compression, Compressor
from overlap.transport.operation import all_reduce

__all__ = [
    "Allreduce",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "stand_in",
]


class Allreduce(Operation):
    """The operation: reduces tensors, in place or into new ones.

    An average divides by the size of the set, as in Horovod.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], op: ReduceOp, prescale: float, postscale: float, *, in_place: bool
    ) -> None:
        self._tensors, self._op, self._in_place = list(tensors), op, in_place
        self._prescale, self._postscale = prescale, postscale
        self._buffers = [plain(tensor) if in_place else own_copy(tensor) for tensor in tensors]
        self._batches: list[Batch] = []

    def start(self, response: Response, group: Group) -> list[Work]:
        for buffer in self._buffers:
            scale_(buffer, self._prescale)
        self._batches = batches(self._buffers, self._op)
        works = []
        for batch in self._batches:
            op, batch.divisor = on_the_wire(self._op, batch.flat.dtype, group.size)
            works.append(group.members.start(all_reduce(batch.flat, batch.flat, op, label=response.request.name)))
        return works

    def result(self) -> list[torch.Tensor]:
        for batch in self._batches:
            divide_(batch.flat, batch.divisor)
            batch.unpack()
        for buffer in self._buffers:
            scale_(buffer, self._postscale)
        if not self._in_place:
            pairs = zip(self._buffers, self._tensors, strict=True)
            return [buffer.to(tensor.device) for buffer, tensor in pairs]
        for buffer, tensor in zip(self._buffers, self._tensors, strict=True):
            if buffer.data_ptr() != tensor.data_ptr():
                put_back(tensor, buffer)
        return self._tensors


def stand_in(response: Response) -> Operation:
    """The operation that a rank which has joined makes with the others: it contributes nothing to their reductions."""
    request = response.request
    if request.kind is not Kind.ALLREDUCE:
        assert request.kind in (Kind.BARRIER, Kind.JOIN), f"{request.title} on a rank that did not ask for it"
        return Nothing()
    op = ReduceOp[request.op]
    return Allreduce([_neutral(spec, op) for spec in request.tensors], op, 1.0, 1.0, in_place=True)


def _neutral(spec: TensorSpec, op: ReduceOp) -> torch.Tensor:
    """What changes no other rank's contribution. Of zeros, -0.0: it leaves the sign of the others' zeros alone."""
    dtype = dtype_of(spec)
    if op is ReduceOp.PROD:
        return torch.ones(spec.shape, dtype=dtype, device="cpu")
    if op in (ReduceOp.MIN, ReduceOp.MAX):
        return torch.full(spec.shape, _extreme(dtype, largest=op is ReduceOp.MIN), dtype=dtype, device="cpu")
    zeros = torch.zeros(spec.shape, dtype=dtype, device="cpu")
    return -zeros if dtype.is_floating_point or dtype.is_complex else zeros


def _extreme(dtype: torch.dtype, *, largest: bool) -> float:
    if dtype is torch.bool:
        return largest
    if dtype.is_floating_point:
        return float("inf") if largest else float("-inf")
    limits = torch.iinfo(dtype)
    return limits.max if largest else limits.min


class _Call(ReductionCall):
    __slots__ = ()

    def start(self, tensors: Iterable[torch.Tensor], *, in_place: bool = False, single: bool = False) -> Pending:
        return self.enqueue(tensors, partial(Allreduce, in_place=in_place), single=single)


def _call(
    average: bool | None,
    name: str | None,
    op: Any,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    *,
    group: bool = False,
) -> _Call:
    """Called by what users call, directly: a warning names their line."""
    if isinstance(average, bool) and op is None:  # anything else is refused, where other ranks are told
        warnings.warn("average= is Horovod's old spelling of op=Average or op=Sum", DeprecationWarning, stacklevel=3)
    found = operation_name(Kind.ALLREDUCE, name, process_set, group=group)
    return _Call(Kind.ALLREDUCE, found, op, average, prescale, postscale, process_set)


class _Differentiable(torch.autograd.Function):
    """The gradient of a sum or an average of all ranks' inputs is the same reduction of all ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        return tuple(call.start(tensors).wait())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: _Call = ctx.call
        op = call.differentiable_op()
        wanted = [index for index, needed in enumerate(ctx.needs_input_grad[1:]) if needed]
        back = call._replace(name=f"{call.name}.backward", op=op, average=None)
        reduced = iter(_Differentiable.apply(back, *(gradients[index] for index in wanted)))
        return (None, *(next(reduced) if needed else None for needed in ctx.needs_input_grad[1:]))


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """A new tensor: the reduction (default: the average) of every rank's `tensor`. On every rank of `process_set`.

    Args:
        tensor: same shape and dtype on all ranks; any layout and device, not sparse.
        average: Horovod's old spelling of `op`: True is Average, False is Sum.
        name: which calls belong together; unnamed ones do in the order in which each rank makes them.
        compression: what travels instead of `tensor`; the reduction happens in that form.
        op: Average, Sum, Min, Max or Product. Ranks that have joined contribute nothing; an average divides by the size of
            the set all the same, as in Horovod.
        prescale_factor: `tensor` is multiplied by it before the reduction, the result by `postscale_factor` after it.

    Differentiable for Sum and Average: the backward pass is the same reduction of the gradients.

    Raises :class:`Mismatch` on every rank where ranks disagree on shape, dtype, op or factors, ``ValueError`` while
    another allreduce of the same name is under way.
    """
    call = _call(average, name, op, prescale_factor, postscale_factor, process_set)
    ((compressed, context),) = call.compress(compression, [tensor])
    (reduced,) = _Differentiable.apply(call, compressed)
    return compression.decompress(reduced, context)


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As :func:`allreduce`, not differentiable; returns at once a handle for ``poll`` and ``synchronize``."""
    call = _call(average, name, op, prescale_factor, postscale_factor, process_set)
    return runtime().handles.give(call.start([tensor], single=True))


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce `tensor` in place, and return it; autograd does not see it. Otherwise as :func:`allreduce`."""
    call = _call(average, name, op, prescale_factor, postscale_factor, process_set)
    result: torch.Tensor = call.start([tensor], in_place=True, single=True).wait()
    return result


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As :func:`allreduce_`; `tensor` belongs to the operation until ``synchronize`` has had the handle."""
    call = _call(average, name, op, prescale_factor, postscale_factor, process_set)
    return runtime().handles.give(call.start([tensor], in_place=True, single=True))


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """As :func:`allreduce` of each tensor, as one operation under one name; small ones share a collective."""
    call = _call(average, name, op, prescale_factor, postscale_factor, process_set, group=True)
    pairs = call.compress(compression, tensors)
    reduced = _Differentiable.apply(call, *(compressed for compressed, _ in pairs))
    return [compression.decompress(tensor, context) for tensor, (_, context) in zip(reduced, pairs, strict=True)]


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As :func:`allreduce_async` of a group; ``synchronize`` returns a list."""
    call = _call(average, name, op, prescale_factor, postscale_factor, process_set, group=True)
    return runtime().handles.give(call.start(tensors))


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """As :func:`allreduce_` of a group."""
    call = _call(average, name, op, prescale_factor, postscale_factor, process_set, group=True)
    result: list[torch.Tensor] = call.start(tensors, in_place=True).wait()
    return result


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As :func:`allreduce_async_` of a group."""
    call = _call(average, name, op, prescale_factor, postscale_factor, process_set, group=True)
    return runtime().handles.give(call.start(tensors, in_place=True))
