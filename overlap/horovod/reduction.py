"""Resolves which reduction a caller means, and holds what all forms of reductions share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from comm_core import ReduceOp
from overlap.horovod.controller.enqueue import enqueue, telling_others
from overlap.horovod.controller.operation import Group, Only, Operation, Pending
from overlap.horovod.controller.request import Kind, Request
from overlap.horovod.tensors import check_reducible, spec_of, tensors_of
from overlap.job.process_set import ProcessSet
from overlap.transport.compression import Compressor

__all__ = [
    "Adasum",
    "Average",
    "Batch",
    "Max",
    "Min",
    "Product",
    "ReductionCall",
    "Sum",
    "batches",
    "divide_",
    "on_the_wire",
    "resolve",
    "wire_dtype",
]

Average, Sum, Min, Max, Product = ReduceOp.AVG, ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PROD


class _Adasum:
    """The name exists, so that scripts can mention it."""

    def __repr__(self) -> str:
        return "Adasum"


Adasum = _Adasum()


def resolve(op: Any, average: bool | None = None) -> ReduceOp:
    """The reduction that `op`, or Horovod's older `average`, asks for; an average when neither does.

    Raises ``ValueError`` when both are given and ``NotImplementedError`` for Adasum.
    """
    if average is not None:
        if not isinstance(average, bool):
            raise ValueError(f"average should be True or False and is {average!r}; a reduction is given as op=")
        if op is not None:
            raise ValueError(f"op={op!r} and average={average!r} say the same thing twice; give op alone")
        return Average if average else Sum
    if op is None:
        return Average
    if op is Adasum:
        raise NotImplementedError(
            "Adasum is not offered: it changes what an optimizer computes with every change of the number of ranks, while "
            "everything here equals training in one process; use Average or Sum"
        )
    if not isinstance(op, ReduceOp):
        raise ValueError(f"op should be Average, Sum, Min, Max or Product and is {op!r}")
    return op


class ReductionCall(NamedTuple):
    """The arguments that all forms of an allreduce share, and all forms of a reducescatter."""

    kind: Kind
    name: str
    op: Any
    average: bool | None
    prescale: float
    postscale: float
    process_set: ProcessSet

    def enqueue(
        self, tensors: Iterable[torch.Tensor], operation: Callable[..., Operation], *, single: bool = False
    ) -> Pending:
        """Ask for the `operation`, a class, on `tensors`. The result of a `single` one is not a list."""

        def prepare(name: str, group: Group) -> tuple[Request, Operation]:
            op, what = resolve(self.op, self.average), self.kind.value
            members = tensors_of(what, tensors)
            for tensor in members:
                check_reducible(what, tensor, op, self.prescale, self.postscale)
                if self.kind is Kind.REDUCESCATTER and not tensor.dim():
                    raise ValueError("reducescatter divides a tensor along its first dimension and was given a scalar")
            specs = tuple(spec_of(tensor) for tensor in members)
            factors = float(self.prescale), float(self.postscale)
            made = operation(members, op, *factors)
            request = Request(self.kind, name, group.number, specs, op.name, *factors)
            return request, Only(made) if single else made

        return enqueue(self.kind, self.name, self.process_set, prepare)

    def compress(
        self, compression: type[Compressor], tensors: Iterable[torch.Tensor]
    ) -> list[tuple[torch.Tensor, Any]]:
        """The tensors as they are sent, and what `compression` needs to undo that."""
        with telling_others(self.kind, self.name, self.process_set):
            if not (hasattr(compression, "compress") and hasattr(compression, "decompress")):
                raise TypeError(
                    f"compression should be one of hvd.Compression, or a Compressor, and is {compression!r}"
                )
            return [compression.compress(tensor) for tensor in tensors]

    def differentiable_op(self) -> ReduceOp:
        """The reduction, if it has a gradient; raises ``NotImplementedError`` otherwise."""
        op = resolve(self.op, self.average)
        if op not in (ReduceOp.SUM, ReduceOp.AVG):
            raise NotImplementedError(
                f"{self.kind.value} {self.name!r}: the gradient of {op.name} is not defined; Sum and Average have one"
            )
        return op


# - How ranks carry it out


def on_the_wire(op: ReduceOp, dtype: torch.dtype, size: int) -> tuple[ReduceOp, int]:
    """The operation that ranks carry out for `op`, and the divisor of its result: integer averages are cut off."""
    if op is not ReduceOp.AVG or dtype.is_floating_point or dtype.is_complex:
        return op, 1
    return ReduceOp.SUM, size


def wire_dtype(dtype: torch.dtype, op: ReduceOp) -> torch.dtype:
    """The type in which tensors of `dtype` are reduced: a sum of small integers may need a larger one."""
    return torch.int32 if op is ReduceOp.AVG and dtype in (torch.int8, torch.uint8, torch.int16) else dtype


@torch.inference_mode()  # as `scale_`
def divide_(total: torch.Tensor, divisor: int) -> None:
    if divisor == 1:
        return
    if total.dtype.is_floating_point or total.dtype.is_complex:
        total.mul_(1.0 / divisor)
    else:
        total.copy_(torch.div(total, divisor, rounding_mode="trunc"))


# - Small tensors of one operation share a collective

#: Larger tensors gain nothing from sharing, and would be copied twice.
FUSED_BYTES = 256 * 1024


class Batch:
    """Tensors of one dtype in one flat buffer; a single one in its own memory."""

    def __init__(self, tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> None:
        self._tensors = tensors
        self.divisor = 1
        """What a sum has yet to be divided by."""
        if len(tensors) == 1 and tensors[0].dtype is dtype:
            self.flat = tensors[0].view(-1)
        else:
            self.flat = torch.cat([tensor.view(-1) for tensor in tensors]).to(dtype)

    @torch.inference_mode()  # as `scale_`
    def unpack(self) -> None:
        """Give each tensor its part of the result."""
        if self.flat.data_ptr() == self._tensors[0].data_ptr() and len(self._tensors) == 1:
            return
        parts = self.flat.split([tensor.numel() for tensor in self._tensors])
        for tensor, part in zip(self._tensors, parts, strict=True):
            tensor.view(-1).copy_(part)


def batches(tensors: Sequence[torch.Tensor], op: ReduceOp) -> list[Batch]:
    """Divide `tensors` (contiguous) the same way on every rank: it depends on their dtypes and sizes alone."""
    shared: dict[torch.dtype, list[torch.Tensor]] = {}
    groups: list[list[torch.Tensor]] = []
    for tensor in tensors:
        if tensor.nbytes > FUSED_BYTES:
            groups.append([tensor])
        else:
            group = shared.get(tensor.dtype)
            if group is None:
                shared[tensor.dtype] = group = []
                groups.append(group)
            group.append(tensor)
    return [Batch(group, wire_dtype(group[0].dtype, op)) for group in groups]
