"""The carrier that goes through pinned memory and the host's transport, which works everywhere.

    device   | kernel ─┐                                                      ┌─ copy, kernel |
    host               └─▶ copy ─▶ | the host's collective, engine's thread | ┘
                        [1]                                                [2]
    [1] the issuing thread waits until the copy is made      [2] whoever arrives waits for the collective, not for the copy

Results are those of the host's communicator, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from comm_core import ReduceOp
from overlap.transport.communicator import Communicator, Work
from overlap.transport.cuda.streams import Streams
from overlap.transport.cuda.work import StagedWork

__all__ = ["StagedCarrier"]


class StagedCarrier:
    """A `overlap.transport.cuda.communicator.Carrier` over the communicator `host`."""

    through_host = True

    def __init__(self, host: Communicator, streams: Streams) -> None:
        self._host, self._streams = host, streams

    def _down(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        copies = [self._streams.pinned(tensor) for tensor in tensors]
        self._streams.fetch(list(zip(copies, tensors, strict=True)))
        return copies

    def _back(self, work: Work, *pairs: tuple[torch.Tensor, torch.Tensor]) -> Work:
        """`pairs` are (device, host)."""
        return StagedWork(work, lambda stream: self._streams.bring(pairs, stream), self._streams.current)

    def reduce_scatter(
        self, send: torch.Tensor, recv: torch.Tensor, counts: Sequence[int], op: ReduceOp, label: str
    ) -> Work:
        (mine,), into = self._down(send), self._streams.pinned(recv)
        return self._back(self._host.reduce_scatter_async(mine, into, op, counts=counts, label=label), (recv, into))

    def all_gather(self, send: torch.Tensor, recv: torch.Tensor, counts: Sequence[int], label: str) -> Work:
        (mine,), into = self._down(send), self._streams.pinned(recv)
        return self._back(self._host.all_gather_async(mine, into, counts=counts, label=label), (recv, into))

    def all_reduce(self, send: torch.Tensor, recv: torch.Tensor, op: ReduceOp, label: str) -> Work:
        (both,) = self._down(send)
        return self._back(self._host.all_reduce_async(both, both, op, label=label), (recv, both))

    def broadcast(self, tensor: torch.Tensor, root: int, label: str) -> Work:
        if self._host.rank == root:
            (mine,) = self._down(tensor)
            return self._back(self._host.broadcast_async(mine, root, label=label))
        into = self._streams.pinned(tensor)
        return self._back(self._host.broadcast_async(into, root, label=label), (tensor, into))

    def reduce(self, send: torch.Tensor, recv: torch.Tensor | None, op: ReduceOp, root: int, label: str) -> Work:
        (mine,) = self._down(send)
        if recv is None:
            return self._back(self._host.reduce_async(mine, None, op, root, label=label))
        return self._back(self._host.reduce_async(mine, mine, op, root, label=label), (recv, mine))

    def all_to_all(
        self,
        send: torch.Tensor,
        recv: torch.Tensor,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        label: str,
    ) -> Work:
        (mine,), into = self._down(send), self._streams.pinned(recv)
        work = self._host.all_to_all_async(mine, into, send_counts=send_counts, recv_counts=recv_counts, label=label)
        return self._back(work, (recv, into))

    def pending(self) -> list[Work]:
        return []

    def abandon(self) -> None:
        """Do nothing: all operations are the host's."""

    def close(self) -> None:
        """Do nothing: whoever made the host's communicator closes it."""
