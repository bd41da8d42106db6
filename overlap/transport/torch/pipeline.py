"""Pipelined stages: rings and chains of segments, each passed on as soon as it has arrived.

Receives are announced ahead of their turn, so that the peer knows of them when its data is ready.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch

from comm_core import ReduceOp
from overlap.transport.reduction import average_, combine, combine_all, is_half
from overlap.transport.torch.gloo import Link, Message
from overlap.transport.torch.ring import Arrival, Span
from overlap.transport.torch.stages import SEGMENT_BYTES, WINDOW, Stage, view

__all__: list[str] = []

#: A ring's message, at most. A rank sends one half of a shard while the other arrives, so that a ring needs no smaller
#: segments to keep its links busy, and larger ones cost less CPU time; this much sums up while it is in the cache.
RING_SEGMENT_BYTES = 4 * SEGMENT_BYTES


def ring_segment_numel(shard_numel: int, element_size: int) -> int:
    """The most elements in one segment of a ring whose largest shard has `shard_numel`."""
    nbytes = min(max(SEGMENT_BYTES, -(-shard_numel // 2) * element_size), RING_SEGMENT_BYTES)
    return max(1, nbytes // element_size)


class Pipeline(Stage):
    """Segments that arrive from the previous rank, in order, some of which go on to the next: a ring or a chain."""

    def __init__(self, first: Sequence[torch.Tensor], arrivals: Sequence[Arrival]) -> None:
        self._first = first
        self._arrivals = arrivals
        self._received: list[tuple[Message, torch.Tensor]] = []
        self._sent: list[Message | None] = []
        self._tag = 0

    @abstractmethod
    def landing(self, link: Link, index: int) -> torch.Tensor:
        """The memory into which arrival number `index` is received."""

    def arrived(self, index: int, landed: torch.Tensor) -> torch.Tensor:
        """Use what arrived, and return what goes on to the next rank, if it does."""
        return landed

    def meanwhile(self) -> None:
        """Do local work while the first messages travel."""

    def post(self, link: Link, tag: int) -> None:
        self._tag = tag
        self._announce(link, WINDOW)
        after = (link.rank + 1) % link.size
        self._sent = [link.send(tensor, after, tag) for tensor in self._first]

    def finish(self, link: Link) -> None:
        self.meanwhile()
        after = (link.rank + 1) % link.size
        for index, arrival in enumerate(self._arrivals):
            self._announce(link, index + WINDOW)
            message, landed = self._received[index]
            link.wait(message)
            onward = self.arrived(index, landed)
            if arrival.forward:
                self._sent.append(link.send(onward, after, self._tag))
        for number in range(len(self._sent)):
            self._await_sent(link, number)

    def sent_on(self, link: Link, index: int) -> None:
        """Wait until arrival `index`, which was forwarded, has left its buffer."""
        self._await_sent(link, len(self._first) + index)

    def _await_sent(self, link: Link, number: int) -> None:
        message = self._sent[number]
        if message is not None:
            link.wait(message)
            self._sent[number] = None  # a message can be waited for once

    def _announce(self, link: Link, upto: int) -> None:
        before = (link.rank - 1) % link.size
        for index in range(len(self._received), min(upto, len(self._arrivals))):
            target = self.landing(link, index)
            self._received.append((link.recv(target, before, self._tag), target))


class Relay(Pipeline):
    """The ring of an all-gather or the chain of a broadcast: segments land in their place and are passed on."""

    def __init__(
        self,
        buffer: torch.Tensor,
        first: Sequence[torch.Tensor],
        arrivals: Sequence[Arrival],
        own: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        super().__init__(first, arrivals)
        self._buffer = buffer
        self._own = own

    def landing(self, link: Link, index: int) -> torch.Tensor:
        return view(self._buffer, self._arrivals[index].span)

    def meanwhile(self) -> None:
        if self._own is not None:
            target, source = self._own
            target.copy_(source)


class RingReduce(Pipeline):
    """The ring of a reduce-scatter: our part is added to what arrives, and the sum goes on or, at last, stays.

    `out` is our shard's destination. It takes the last hop's partial sums directly, unless it is a part of `send`,
    which has to keep our own summands until they are added.
    """

    def __init__(
        self,
        send: torch.Tensor,
        out: torch.Tensor,
        first: Sequence[Span],
        arrivals: Sequence[Arrival],
        op: ReduceOp,
        size: int,
        in_place: bool,
    ) -> None:
        super().__init__([view(send, span) for span in first], arrivals)
        self._send, self._out, self._op, self._size, self._in_place = send, out, op, size, in_place
        self._base = min((arrival.span.start for arrival in arrivals if not arrival.forward), default=0)
        self._slots: list[torch.Tensor] = []
        # [Note: a ring holds a shard]
        # Our arrival k, sent on, is the next rank's arrival F + k, F being the number of segments we sent first. It is
        # received there only once that rank has announced so many; with F slots or fewer, every rank waits for the next
        # to announce what that one will announce only when its own slot is free.
        self._num_slots = len(first) + WINDOW

    def landing(self, link: Link, index: int) -> torch.Tensor:
        arrival = self._arrivals[index]
        if not arrival.forward and not self._in_place:
            return self._final(arrival.span)
        numel = arrival.span.stop - arrival.span.start
        if index < self._num_slots:
            self._slots.append(torch.empty(self._slot_numel(), dtype=self._send.dtype, device="cpu"))
        elif self._arrivals[index - self._num_slots].forward:
            self.sent_on(link, index - self._num_slots)
        return self._slots[index % self._num_slots][:numel]

    def arrived(self, index: int, landed: torch.Tensor) -> torch.Tensor:
        arrival = self._arrivals[index]
        own = view(self._send, arrival.span)
        if arrival.forward:
            combine(self._op, landed, own, landed)
            return landed
        target = self._final(arrival.span)
        if is_half(target.dtype):
            combine_all(self._op, (landed, own), target, self._size)
        else:
            combine(self._op, landed, own, target)
            if self._op is ReduceOp.AVG:
                average_(target, self._size)
        return target

    def _final(self, span: Span) -> torch.Tensor:
        return self._out[span.start - self._base : span.stop - self._base]

    def _slot_numel(self) -> int:
        return max(arrival.span.stop - arrival.span.start for arrival in self._arrivals)
