"""The carrier that goes through pinned memory and the host's transport, which works everywhere.

    device   | kernel ─┐                                                      ┌─ copy, kernel |
    host               └─▶ copy ─▶ | the host's collective, engine's thread | ┘
                        [1]                                                [2]
    [1] a thread waits for the copy and issues       [2] whoever arrives waits for the collective, not for the copy

Results are those of the host's communicator, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from comm_core import ReduceOp
from overlap.transport.communicator import Communicator, Work
from overlap.transport.cuda.issuing import Issuer
from overlap.transport.cuda.streams import Streams
from overlap.transport.cuda.work import Moment, StagedWork

__all__ = ["StagedCarrier"]


class StagedCarrier:
    """A `overlap.transport.cuda.communicator.Carrier` over the communicator `host`."""

    through_host = True

    def __init__(self, host: Communicator, streams: Streams) -> None:
        self._host, self._streams, self._issuer = host, streams, Issuer(host, streams.bind)

    def _down(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Moment | None]:
        """A copy on the host, and when it is there."""
        copy = self._streams.pinned(tensor)
        return copy, self._streams.fetch([(copy, tensor)])

    def _issue(
        self,
        copied: Moment | None,
        issue: Callable[[], Work],
        title: tuple[str, str, torch.Tensor],
        *pairs: tuple[torch.Tensor, torch.Tensor],
    ) -> Work:
        """`title`: kind, label and what travels; `pairs` are (device, host)."""
        kind, label, mine = title
        work = self._issuer.issue(copied, issue, (kind, label, mine.numel() * mine.element_size()))
        return StagedWork(work, lambda stream: self._streams.bring(pairs, stream), self._streams.current)

    def reduce_scatter(
        self, send: torch.Tensor, recv: torch.Tensor, counts: Sequence[int], op: ReduceOp, label: str
    ) -> Work:
        (mine, copied), into = self._down(send), self._streams.pinned(recv)
        return self._issue(
            copied,
            lambda: self._host.reduce_scatter_async(mine, into, op, counts=counts, label=label),
            ("reduce_scatter", label, mine),
            (recv, into),
        )

    def all_gather(self, send: torch.Tensor, recv: torch.Tensor, counts: Sequence[int], label: str) -> Work:
        (mine, copied), into = self._down(send), self._streams.pinned(recv)
        return self._issue(
            copied,
            lambda: self._host.all_gather_async(mine, into, counts=counts, label=label),
            ("all_gather", label, into),
            (recv, into),
        )

    def all_reduce(self, send: torch.Tensor, recv: torch.Tensor, op: ReduceOp, label: str) -> Work:
        both, copied = self._down(send)
        return self._issue(
            copied,
            lambda: self._host.all_reduce_async(both, both, op, label=label),
            ("all_reduce", label, both),
            (recv, both),
        )

    def broadcast(self, tensor: torch.Tensor, root: int, label: str) -> Work:
        if self._host.rank == root:
            mine, copied = self._down(tensor)
            return self._issue(
                copied, lambda: self._host.broadcast_async(mine, root, label=label), ("broadcast", label, mine)
            )
        into = self._streams.pinned(tensor)
        return self._issue(
            None,
            lambda: self._host.broadcast_async(into, root, label=label),
            ("broadcast", label, into),
            (tensor, into),
        )

    def reduce(self, send: torch.Tensor, recv: torch.Tensor | None, op: ReduceOp, root: int, label: str) -> Work:
        mine, copied = self._down(send)
        return self._issue(
            copied,
            lambda: self._host.reduce_async(mine, None if recv is None else mine, op, root, label=label),
            ("reduce", label, mine),
            *(() if recv is None else ((recv, mine),)),
        )

    def all_to_all(
        self,
        send: torch.Tensor,
        recv: torch.Tensor,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        label: str,
    ) -> Work:
        (mine, copied), into = self._down(send), self._streams.pinned(recv)
        return self._issue(
            copied,
            lambda: self._host.all_to_all_async(
                mine, into, send_counts=send_counts, recv_counts=recv_counts, label=label
            ),
            ("all_to_all", label, mine),
            (recv, into),
        )

    def flush(self) -> None:
        """Block until all that was handed in is issued on the host's communicator."""
        self._issuer.flush()

    def pending(self) -> list[Work]:
        """What waits for its copy; the rest is the host's."""
        return self._issuer.pending()

    def abandon(self) -> None:
        """End, with an error, what is not issued yet; the rest is the host's."""
        self._issuer.abandon()

    def close(self) -> None:
        """Issue what was handed in; whoever made the host's communicator closes it."""
        self._issuer.close()
