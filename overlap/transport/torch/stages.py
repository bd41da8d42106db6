"""Stages of an operation on the wire: messages posted without blocking, then waits that finish them.

Receives are posted ahead of what they wait for: they are then known to the peer when its data is ready.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

from comm_core import ReduceOp, TransportError
from overlap.transport.reduction import combine_all
from overlap.transport.torch.gloo import Link, Message
from overlap.transport.torch.meaning import Inquiry, Meaning
from overlap.transport.torch.ring import Span, segments, shard_spans
from overlap.transport.torch.worker_thread import Task

__all__: list[str] = []

#: A message. Large enough that Python's part per message does not count, small enough for a pipeline.
SEGMENT_BYTES = 512 * 1024
#: How many receives are posted ahead. A receive is announced to the sender on the connection that carries our own bulk
#: data, and must get there before its turn although up to a socket buffer of data queues in front of it.
WINDOW = 8


class Stage(ABC):
    """A round of messages. `post` never blocks."""

    @abstractmethod
    def post(self, link: Link, tag: int) -> None:
        """Announce receives and start the sends that wait for nothing."""

    @abstractmethod
    def finish(self, link: Link) -> None:
        """Finish the messages; afterwards all buffers are the caller's again."""


class StagedTask(Task):
    """An operation made of stages, each posted when the one before it has finished."""

    def __init__(
        self, link: Link, number: int, meaning: Meaning, inquiry: Inquiry, stages: Callable[[], Sequence[Stage]]
    ) -> None:
        """Operation `number` of a communicator, which has an `inquiry` for all of them."""
        self._link, self._number, self._meaning, self._inquiry, self._make = link, number, meaning, inquiry, stages
        self._tag = meaning.tag(number)
        self._stages: Sequence[Stage] = ()

    def post(self) -> None:
        self._stages = self._make()
        self._stages[0].post(self._link, self._tag)

    def finish(self) -> None:
        try:
            for number, stage in enumerate(self._stages):
                if number:
                    stage.post(self._link, self._tag)
                stage.finish(self._link)
        except TransportError as error:
            reason = self._inquiry.why(self._number, self._meaning)
            if reason is None:
                raise
            raise TransportError(reason) from error

    def ask(self) -> None:
        self._inquiry.begin(self._number, self._meaning)

    def fail(self) -> None:
        self._link.tear_down()


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

    def finish(self, link: Link) -> None:
        if self._meanwhile is not None:
            self._meanwhile()
        for message in self._messages:
            link.wait(message)
        if self._afterwards is not None:
            self._afterwards()


class Local(Stage):
    """Work without messages."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work

    def post(self, link: Link, tag: int) -> None:
        pass

    def finish(self, link: Link) -> None:
        self._work()


class DirectReduce(Stage):
    """A reduce-scatter without partial sums on the wire: every rank's part comes to the owner, who adds in rank order.

    As many bytes as the ring moves. For 16-bit types, whose partial sums would round at every hop, and for small
    buffers, which one hop serves faster.
    """

    def __init__(self, send: torch.Tensor, out: torch.Tensor, counts: Sequence[int], op: ReduceOp, rank: int) -> None:
        self._op, self._out, self._rank, self._size = op, out, rank, len(counts)
        limit = max(1, SEGMENT_BYTES // send.element_size())
        shards = shard_spans(counts)
        self._own = view(send, shards[rank])
        self._rounds = segments(Span(0, out.numel()), limit)
        parts = [[view(send, span) for span in segments(shard, limit)] for shard in shards]
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

    def finish(self, link: Link) -> None:
        for index, span in enumerate(self._rounds):
            for message in self._received[index]:
                link.wait(message)
            slots = self._slots[index % self._ahead]
            parts = [slot[: span.stop - span.start] for slot in slots]
            parts[self._rank] = view(self._own, span)
            combine_all(self._op, parts, view(self._out, span), self._size)
            self._announce(link, index + 1 + self._ahead)
        for message in self._sent:
            link.wait(message)

    def _announce(self, link: Link, upto: int) -> None:
        for index in range(len(self._received), min(upto, len(self._rounds))):
            span = self._rounds[index]
            if index < self._ahead:
                longest = max(other.stop - other.start for other in self._rounds)
                numels = [0 if peer == self._rank else longest for peer in range(self._size)]
                self._slots.append([torch.empty(numel, dtype=self._out.dtype, device="cpu") for numel in numels])
            slots = self._slots[index % self._ahead]
            numel = span.stop - span.start
            self._received.append([link.recv(slots[peer][:numel], peer, self._tag) for peer in self._others])


def view(tensor: torch.Tensor, span: Span) -> torch.Tensor:
    """The elements of a span."""
    return tensor[span.start : span.stop]
