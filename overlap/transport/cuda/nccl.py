"""The carrier that uses NCCL, with comm_core's numerical contract. No host thread waits for the device.

    stream of the computation | kernel ─┐                                             ┌─ kernel |
    stream of the communicator          └─▶ | NCCL | ─┐                               │
    side stream of the carrier                           └─▶ | sum, divide, round once | ┘
                                        [1]           [2]                             [3]
    [1] [2] [3] events; the side stream has a part in averages and in sums of 16-bit types alone

[Note: sums of 16 bits] NCCL rounds a partial sum at every hop, and sizes and links decide which way a sum goes. So fp16
and bf16 are exchanged directly: the owner of a shard gets every rank's part, adds them in fp32 in rank order, and rounds
once. That is as many bytes on the wire as a reduce-scatter takes, and the same result as over MPI, bit for bit.

[Note: averages] NCCL's own average multiplies by 1/size before it adds, where small values are
lost. So sums travel, and are divided afterwards, rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from comm_core import Buffer, ReduceOp
from overlap.transport.checks import DTYPES, balanced_split
from overlap.transport.communicator import Start, Work
from overlap.transport.cuda.communicator import Carrier
from overlap.transport.cuda.math import divide
from overlap.transport.cuda.streams import Moment, Streams
from overlap.transport.cuda.work import NcclWork
from overlap.transport.native import arguments
from overlap.transport.operation import REDUCTIONS, Collective, Operation, all_gather
from overlap.transport.reduction import is_half

__all__ = ["NcclCarrier"]

_ROUNDING = (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PROD)  # the least and the greatest are exact anywhere


class NcclCarrier(Carrier):
    """A carrier over `core`, a communicator of ``comm_core.nccl()``."""

    through_host = False

    def __init__(self, core: Any, streams: Streams) -> None:
        self._core, self._streams = core, streams
        self._rank, self._size = int(core.rank), int(core.size)

    def prepare(self, operation: Operation) -> Start:
        sent, recv, current = operation, operation.recv, self._streams.current
        average = False
        if operation.kind in REDUCTIONS:
            if self._size > 1 and is_half(operation.send.dtype) and operation.op in _ROUNDING:
                return partial(self._start_by_owner, operation)
            if operation.op is ReduceOp.AVG:
                sent = replace(operation, op=ReduceOp.SUM)
                average = self._size > 1 and recv.dtype is not torch.bool and recv.numel() > 0

        def start() -> Work:
            work = self._issue(sent, current())
            if not average:
                return self._work(work, sent)
            return self._then(work, lambda: _divide(recv, self._size), recv, sent)

        return start

    def _start_by_owner(self, one: Operation) -> Work:
        """[Note: sums of 16 bits]: owners reduce their elements, and all ranks gather what all are to have."""
        recv, counts, side = one.recv, one.send_counts or (), self._streams.side
        if one.kind is Collective.REDUCE:
            counts = [one.send.numel() if rank == one.root else 0 for rank in range(self._size)]
        elif one.kind is Collective.ALL_REDUCE:
            counts = balanced_split(recv.numel(), self._size)
            recv = recv.split(counts)[self._rank]
        mine = counts[self._rank]
        parts = self._streams.scratch(self._size * mine, one.send.dtype)
        work = self._core.all_to_all_async(
            self._buffer(one.send, True, self._streams.current()),
            self._buffer(parts, False, side),
            send_counts=counts,
            recv_counts=[mine] * self._size,
            label=one.label or one.kind.value,
        )
        reduced = self._work(work, one)
        if mine:
            reduced = self._then(work, lambda: _reduce(parts.view(self._size, mine), recv, one.op), recv, one)
        if one.kind is not Collective.ALL_REDUCE:
            return reduced
        return self._work(self._issue(all_gather(recv, one.recv, counts=counts, label=one.label), side), one)

    def pending(self) -> list[Work]:
        return list(self._core.pending())

    def abandon(self) -> None:
        self._core.abandon()

    def close(self) -> None:
        self._core.close()

    # - How

    def _buffer(self, flat: torch.Tensor, readonly: bool, stream: int) -> Buffer:
        place = {"device": self._streams.device, "stream": stream}
        return Buffer(flat.data_ptr(), flat.numel(), DTYPES[flat.dtype], readonly=readonly, owner=flat, **place)

    def _issue(self, operation: Operation, stream: int) -> Work:
        """Have NCCL carry it out after what `stream` was given."""
        memory, named = arguments(operation, lambda flat, readonly: self._buffer(flat, readonly, stream))
        work: Work = getattr(self._core, f"{operation.kind.value}_async")(*memory, **named)
        return work

    def _work(self, work: Work, operation: Operation, moment: Moment | None = None) -> Work:
        title = operation.kind.value, operation.label or operation.kind.value, operation.nbytes
        return NcclWork(work, moment, self._streams.current, title)

    def _then(self, work: Work, compute: Callable[[], None], touched: torch.Tensor, operation: Operation) -> Work:
        """`compute` on the side stream, after `work`."""
        work.order_before(self._streams.side)
        self._streams.beside(compute, [touched])
        return self._work(work, operation, self._streams.mark())


def _divide(total: torch.Tensor, size: int) -> None:
    if total.is_floating_point():
        divide([total], [total], size)
    else:
        total.copy_(torch.div(total, size, rounding_mode="trunc"))


def _reduce(parts: torch.Tensor, recv: torch.Tensor, op: ReduceOp) -> None:
    total = parts[0].float()
    for part in parts[1:]:
        if op is ReduceOp.PROD:
            total.mul_(part)
        else:
            total.add_(part)
    divide([recv], [total], len(parts) if op is ReduceOp.AVG else 1)
