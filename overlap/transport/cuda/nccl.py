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

from collections.abc import Callable, Sequence
from typing import Any

import torch

from comm_core import Buffer, ReduceOp
from overlap.transport.checks import balanced_split
from overlap.transport.communicator import Work
from overlap.transport.cuda.math import divide
from overlap.transport.cuda.streams import Streams
from overlap.transport.cuda.work import NcclWork
from overlap.transport.native import DTYPES
from overlap.transport.reduction import is_half

__all__ = ["NcclCarrier"]

_ROUNDING = (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PROD)  # the least and the greatest are exact anywhere


class NcclCarrier:
    """A `overlap.transport.cuda.communicator.Carrier` over `core`, a communicator of ``comm_core.nccl()``."""

    through_host = False

    def __init__(self, core: Any, streams: Streams) -> None:
        self._core, self._streams = core, streams
        self._rank, self._size = int(core.rank), int(core.size)

    # - Operations

    def reduce_scatter(
        self, send: torch.Tensor, recv: torch.Tensor, counts: Sequence[int], op: ReduceOp, label: str
    ) -> Work:
        title = ("reduce_scatter", label or "reduce_scatter", send.nbytes)
        if self._by_owner(send, op):
            return self._owned(send, recv, counts, op, title)
        work = self._core.reduce_scatter_async(
            self._buffer(send, readonly=True), self._buffer(recv), _sent(op), counts=counts, label=label
        )
        return self._finish(work, recv, op, title)

    def all_gather(self, send: torch.Tensor, recv: torch.Tensor, counts: Sequence[int], label: str) -> Work:
        work = self._core.all_gather_async(
            self._buffer(send, readonly=True), self._buffer(recv), counts=counts, label=label
        )
        return self._plain(work, ("all_gather", label or "all_gather", recv.nbytes))

    def all_reduce(self, send: torch.Tensor, recv: torch.Tensor, op: ReduceOp, label: str) -> Work:
        title = ("all_reduce", label or "all_reduce", recv.nbytes)
        if self._by_owner(send, op):
            counts = balanced_split(send.numel(), self._size)
            start = sum(counts[: self._rank])
            mine = recv[start : start + counts[self._rank]]
            self._owned(send, mine, counts, op, title)
            side = self._streams.side
            work = self._core.all_gather_async(
                self._buffer(mine, readonly=True, stream=side),
                self._buffer(recv, stream=side),
                counts=counts,
                label=label,
            )
            return self._plain(work, title)
        work = self._core.all_reduce_async(
            self._buffer(send, readonly=True), self._buffer(recv), _sent(op), label=label
        )
        return self._finish(work, recv, op, title)

    def broadcast(self, tensor: torch.Tensor, root: int, label: str) -> Work:
        work = self._core.broadcast_async(self._buffer(tensor), root, label=label)
        return self._plain(work, ("broadcast", label or "broadcast", tensor.nbytes))

    def reduce(self, send: torch.Tensor, recv: torch.Tensor | None, op: ReduceOp, root: int, label: str) -> Work:
        title = ("reduce", label or "reduce", send.nbytes)
        if self._by_owner(send, op):
            counts = [send.numel() if rank == root else 0 for rank in range(self._size)]
            return self._owned(send, send[:0] if recv is None else recv, counts, op, title)
        into = None if recv is None else self._buffer(recv)
        work = self._core.reduce_async(self._buffer(send, readonly=True), into, _sent(op), root, label=label)
        return self._plain(work, title) if recv is None else self._finish(work, recv, op, title)

    def all_to_all(
        self,
        send: torch.Tensor,
        recv: torch.Tensor,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        label: str,
    ) -> Work:
        work = self._core.all_to_all_async(
            self._buffer(send, readonly=True),
            self._buffer(recv),
            send_counts=send_counts,
            recv_counts=recv_counts,
            label=label,
        )
        return self._plain(work, ("all_to_all", label or "all_to_all", recv.nbytes))

    def flush(self) -> None:
        """Do nothing: nothing goes through the host."""

    def pending(self) -> list[Work]:
        return list(self._core.pending())

    def abandon(self) -> None:
        self._core.abandon()

    def close(self) -> None:
        self._core.close()

    # - How

    def _buffer(self, flat: torch.Tensor, *, readonly: bool = False, stream: int | None = None) -> Buffer:
        return Buffer(
            flat.data_ptr(),
            flat.numel(),
            DTYPES[flat.dtype],
            readonly=readonly,
            owner=flat,
            device=self._streams.device,
            stream=self._streams.current() if stream is None else stream,
        )

    def _by_owner(self, send: torch.Tensor, op: ReduceOp) -> bool:
        return self._size > 1 and is_half(send.dtype) and op in _ROUNDING

    def _plain(self, work: Work, title: tuple[str, str, int]) -> Work:
        return NcclWork(work, None, self._streams.current, title)

    def _then(
        self, work: Work, compute: Callable[[], None], touched: torch.Tensor, title: tuple[str, str, int]
    ) -> Work:
        """`compute` on the side stream, after `work`."""
        work.order_before(self._streams.side)
        self._streams.beside(compute, [touched])
        return NcclWork(work, self._streams.mark(), self._streams.current, title)

    def _finish(self, work: Work, recv: torch.Tensor, op: ReduceOp, title: tuple[str, str, int]) -> Work:
        """What is left of an average."""
        if op is not ReduceOp.AVG or self._size == 1 or recv.dtype is torch.bool or not recv.numel():
            return self._plain(work, title)
        return self._then(work, lambda: _divide(recv, self._size), recv, title)

    def _owned(
        self, send: torch.Tensor, recv: torch.Tensor, counts: Sequence[int], op: ReduceOp, title: tuple[str, str, int]
    ) -> Work:
        """[Note: sums of 16 bits]: the reduction of `counts[rank]` elements into `recv`."""
        mine = counts[self._rank]
        parts = self._streams.scratch(self._size * mine, send.dtype)
        work = self._core.all_to_all_async(
            self._buffer(send, readonly=True),
            self._buffer(parts, stream=self._streams.side),
            send_counts=counts,
            recv_counts=[mine] * self._size,
            label=title[1],
        )
        if not mine:
            return self._plain(work, title)
        return self._then(work, lambda: _reduce(parts.view(self._size, mine), recv, op), recv, title)


def _sent(op: ReduceOp) -> ReduceOp:
    return ReduceOp.SUM if op is ReduceOp.AVG else op


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
