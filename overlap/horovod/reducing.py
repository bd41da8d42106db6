"""Operations that reduce: all-reduce and reduce-scatter."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from comm_core import ReduceOp
from overlap.horovod.controller.operation import Group, Operation
from overlap.horovod.controller.request import Response
from overlap.horovod.fusion import Batch, batches
from overlap.horovod.tensors import own_copy, plain, put_back, scale_
from overlap.transport.checks import balanced_split
from overlap.transport.communicator import Work

__all__ = ["Allreduce", "ReduceScatter"]


class Allreduce(Operation):
    """Reduces tensors, in place or into new ones.

    An average divides by the ranks that still contribute. While some have joined, 16-bit floating-point sums travel in
    fp32, because their division, which would otherwise happen before rounding, comes after it.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], op: ReduceOp, prescale: float, postscale: float, *, in_place: bool
    ) -> None:
        self._tensors, self._op, self._in_place = list(tensors), op, in_place
        self._prescale, self._postscale = prescale, postscale
        self._buffers = [plain(tensor) if in_place else own_copy(tensor) for tensor in tensors]
        self._batches: list[Batch] = []
        self._contributors: int | None = None  # None: all ranks

    def start(self, response: Response, group: Group) -> list[Work]:
        if response.joined:
            self._contributors = group.size - len(response.joined)
        for buffer in self._buffers:
            scale_(buffer, self._prescale)
        self._batches = batches(self._buffers, self._wire_dtype)
        works = []
        for batch in self._batches:
            op, batch.divisor = _on_the_wire(self._op, batch.flat.dtype, group.size, self._contributors)
            works.append(group.members.all_reduce_async(batch.flat, batch.flat, op, label=response.request.name))
        return works

    def _wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        summed = self._op in (ReduceOp.SUM, ReduceOp.AVG)
        if summed and self._contributors is not None and dtype in (torch.float16, torch.bfloat16):
            return torch.float32
        return _with_room(dtype, self._op)

    def result(self) -> list[torch.Tensor]:
        for batch in self._batches:
            _divide_(batch.flat, batch.divisor)
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


class ReduceScatter(Operation):
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
            buffer = staged.to(_with_room(staged.dtype, self._op))
            rows = balanced_split(buffer.shape[0], group.size)
            row_numel = buffer.shape[1:].numel()
            output = buffer.new_empty((rows[group.index], *buffer.shape[1:]))
            counts = [count * row_numel for count in rows]
            op, divisor = _on_the_wire(self._op, buffer.dtype, group.size, None)
            name = response.request.name
            works.append(group.members.reduce_scatter_async(buffer, output, op, counts=counts, label=name))
            self._outputs.append(output)
            self._divisors.append(divisor)
        return works

    def result(self) -> list[torch.Tensor]:
        for output, divisor in zip(self._outputs, self._divisors, strict=True):
            _divide_(output, divisor)
            scale_(output, self._postscale)
        return [
            output.to(tensor.device, tensor.dtype) for output, tensor in zip(self._outputs, self._tensors, strict=True)
        ]


def _on_the_wire(op: ReduceOp, dtype: torch.dtype, size: int, contributors: int | None) -> tuple[ReduceOp, int]:
    """What ranks carry out for `op`, and by what the result is divided after it."""
    exact = dtype.is_floating_point or dtype.is_complex
    if op is not ReduceOp.AVG or (exact and contributors is None):
        return op, 1
    return ReduceOp.SUM, size if contributors is None else contributors


def _with_room(dtype: torch.dtype, op: ReduceOp) -> torch.dtype:
    """As what `dtype` is reduced: an average of small numbers is one, and their sum need not be."""
    return torch.int32 if op is ReduceOp.AVG and dtype in (torch.int8, torch.uint8, torch.int16) else dtype


@torch.inference_mode()  # as `scale_`
def _divide_(total: torch.Tensor, divisor: int) -> None:
    if divisor == 1:
        return
    if total.dtype.is_floating_point or total.dtype.is_complex:
        total.mul_(1.0 / divisor)
    else:
        total.copy_(torch.div(total, divisor, rounding_mode="trunc"))
