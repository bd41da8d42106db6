"""What an operation does on the wire: messages posted without blocking, then waits that finish them.

A stage is posted before the one ahead of it has finished whenever possible: its receives are then known to the peer
when the data is ready, and its first sends fill the wire while the last segments of the other are still on it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

from comm_core import ReduceOp
from overlap.link import Link, Message
from overlap.reduction import average_, combine, combine_all, is_half
from overlap.ring import Arrival, Span, segments, shard_spans

__all__: list[str] = []

#: A message. Large enough that Python's part per message does not count, small enough for a pipeline.
SEGMENT_BYTES = 512 * 1024
#: How many receives are posted ahead. A receive is announced to the sender on the connection that carries our own bulk
#: data, and must get there before its turn although up to a socket buffer of data queues in front of it.
WINDOW = 16

Idle = Callable[[], None]


class Stage(ABC):
    """One round of messages. `post` never blocks; `finish` calls `idle` whenever it only waits from then on."""

    @abstractmethod
    def post(self, link: Link, tag: int) -> None:
        """Announce receives and start the sends that wait for nothing."""

    @abstractmethod
    def finish(self, link: Link, idle: Idle) -> None:
        """Do the rest; afterwards all buffers are the caller's again."""


class Exchange(Stage):
    """Messages that do not depend on each other, and local work before and after them."""

    def __init__(
        self,
        sends: Sequence[tuple[int, torch.Tensor]],
        recvs: Sequence[tuple[int, torch.Tensor]],
        meanwhile: Callable[[], object] | None = None,
        afterwards: Callable[[], object] | None = None,
    ) -> None:
        self._sends, self._recvs = sends, recvs
        self._meanwhile, self._afterwards = meanwhile, afterwards
        self._messages: list[Message] = []

    def post(self, link: Link, tag: int) -> None:
        recvs = [link.recv(tensor, peer, tag) for peer, tensor in self._recvs if tensor.numel()]
        sends = [link.send(tensor, peer, tag) for peer, tensor in self._sends if tensor.numel()]
        self._messages = recvs + sends

    def finish(self, link: Link, idle: Idle) -> None:
        if self._meanwhile is not None:
            self._meanwhile()
        idle()
        for message in self._messages:
            link.wait(message)
        if self._afterwards is not None:
            self._afterwards()


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
        """Where arrival number `index` is received."""

    def arrived(self, index: int, landed: torch.Tensor) -> torch.Tensor:
        """Use what arrived; what is returned goes on to the next rank, if it does."""
        return landed

    def meanwhile(self) -> None:
        """Local work, done while the first messages travel."""

    def post(self, link: Link, tag: int) -> None:
        self._tag = tag
        self._announce(link, WINDOW)
        after = (link.rank + 1) % link.size
        self._sent = [link.send(tensor, after, tag) for tensor in self._first]

    def finish(self, link: Link, idle: Idle) -> None:
        self.meanwhile()
        after = (link.rank + 1) % link.size
        for index, arrival in enumerate(self._arrivals):
            self._announce(link, index + WINDOW)
            if not arrival.forward:
                idle()
            message, landed = self._received[index]
            link.wait(message)
            onward = self.arrived(index, landed)
            if arrival.forward:
                self._sent.append(link.send(onward, after, self._tag))
        idle()
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
    """An all-gather's ring or a broadcast's chain: segments land where they belong and are passed on from there."""

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
        return _view(self._buffer, self._arrivals[index].span)

    def meanwhile(self) -> None:
        if self._own is not None:
            target, source = self._own
            target.copy_(source)


class RingReduce(Pipeline):
    """A reduce-scatter's ring: our part is added to what arrives, and the sum goes on or, at last, stays.

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
        super().__init__([_view(send, span) for span in first], arrivals)
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
            self._slots.append(torch.empty(self._slot_numel(), dtype=self._send.dtype))
        elif self._arrivals[index - self._num_slots].forward:
            self.sent_on(link, index - self._num_slots)
        return self._slots[index % self._num_slots][:numel]

    def arrived(self, index: int, landed: torch.Tensor) -> torch.Tensor:
        arrival = self._arrivals[index]
        own = _view(self._send, arrival.span)
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


class DirectReduce(Stage):
    """A reduce-scatter without partial sums on the wire: every rank's part comes to the owner, who adds in rank order.

    As many bytes as the ring moves. For 16-bit types, whose partial sums would round at every hop, and for small
    buffers, which one hop serves faster.
    """

    def __init__(self, send: torch.Tensor, out: torch.Tensor, counts: Sequence[int], op: ReduceOp, rank: int) -> None:
        self._op, self._out, self._rank, self._size = op, out, rank, len(counts)
        limit = max(1, SEGMENT_BYTES // send.element_size())
        shards = shard_spans(counts)
        self._own = _view(send, shards[rank])
        self._rounds = segments(Span(0, out.numel()), limit)
        parts = [[_view(send, span) for span in segments(shard, limit)] for shard in shards]
        others = [(rank + step) % self._size for step in range(1, self._size)]
        longest = max(len(part) for part in parts)
        self._sends = [(peer, parts[peer][i]) for i in range(longest) for peer in others if i < len(parts[peer])]
        self._others = [(rank - step) % self._size for step in range(1, self._size)]
        self._ahead = max(2, WINDOW // max(1, len(others)))
        self._slots: list[list[torch.Tensor]] = []
        self._received: list[list[Message]] = []
        self._sent: list[Message] = []
        self._tag = 0

    def post(self, link: Link, tag: int) -> None:
        self._tag = tag
        self._announce(link, self._ahead)
        self._sent = [link.send(tensor, peer, tag) for peer, tensor in self._sends]

    def finish(self, link: Link, idle: Idle) -> None:
        for index, span in enumerate(self._rounds):
            if index + 1 == len(self._rounds):
                idle()
            for message in self._received[index]:
                link.wait(message)
            slots = self._slots[index % self._ahead]
            parts = [slot[: span.stop - span.start] for slot in slots]
            parts[self._rank] = _view(self._own, span)
            combine_all(self._op, parts, _view(self._out, span), self._size)
            self._announce(link, index + 1 + self._ahead)
        idle()
        for message in self._sent:
            link.wait(message)

    def _announce(self, link: Link, upto: int) -> None:
        for index in range(len(self._received), min(upto, len(self._rounds))):
            span = self._rounds[index]
            if index < self._ahead:
                longest = max(other.stop - other.start for other in self._rounds)
                numels = [0 if peer == self._rank else longest for peer in range(self._size)]
                self._slots.append([torch.empty(numel, dtype=self._out.dtype) for numel in numels])
            slots = self._slots[index % self._ahead]
            numel = span.stop - span.start
            self._received.append([link.recv(slots[peer][:numel], peer, self._tag) for peer in self._others])


def _view(tensor: torch.Tensor, span: Span) -> torch.Tensor:
    return tensor[span.start : span.stop]
