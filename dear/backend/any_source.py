"""Receives from whichever rank sends first, over messages that name their sender.

Both sides count the messages of a pair and tag. A rank that receives from anybody asks the others to tell it when they have
sent more than it has received; it receives from the first that does. Who sends to nobody that asks tells nothing until it
leaves, so other messages cost nothing more.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from typing import Any

import comm_core
from overlap.transport.work import Work

__all__ = ["AnyReceive", "AnySource"]

#: Posts a letter for the rank of this number in the group.
Tell = Callable[[int, Any], object]


class AnyReceive:
    """A receive whose sender is not known yet. A `Work` of the engine, as far as its caller looks."""

    op, nbytes = "recv", 0

    def __init__(self, label: str, tag: int, begin: Callable[[int], Work]) -> None:
        self.label, self.source = label, -1
        self._tag, self._begin, self._since = tag, begin, time.monotonic()
        self._known = threading.Event()
        self._work: Work | None = None
        self._error: comm_core.Error | None = None

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._since

    def begin(self, source: int) -> None:
        """Receive from `source`."""
        try:
            self._work, self.source = self._begin(source), source
        except comm_core.Error as error:
            self._error = error
        self._known.set()

    def fail(self, error: comm_core.Error) -> None:
        self._error = error
        self._known.set()

    def wait(self, timeout: float | None = None) -> None:
        until = None if timeout is None else time.monotonic() + timeout
        if not self._known.wait(timeout):
            raise comm_core.TimeoutError(f"not done after waiting {timeout:.3g} s: {self.describe()}")
        if self._error is not None:
            raise self._error
        assert self._work is not None
        self._work.wait(None if until is None else max(0.0, until - time.monotonic()))

    def done(self) -> bool:
        return self._known.is_set() and (self._work is None or self._work.done())

    def exception(self) -> comm_core.Error | None:
        return self._error if self._work is None else self._work.exception()

    def order_before(self, stream: int) -> None:
        self.wait()

    def describe(self) -> str:
        if self._work is not None:
            return self._work.describe()
        return f"recv {self.label!r} (from any rank, tag {self._tag}): unfinished after {self.seconds:.3f} s"


class AnySource:
    """Of rank `rank` in a group of `size`. Letters come in on another thread."""

    def __init__(self, rank: int, size: int, tell: Tell) -> None:
        self._others = [peer for peer in range(size) if peer != rank]
        self._tell = tell
        self._lock = threading.Lock()
        self._sent: Counter[tuple[int, int]] = Counter()  # by the other rank and tag, as the next three
        self._received: Counter[tuple[int, int]] = Counter()
        self._told: Counter[tuple[int, int]] = Counter()  # what the other rank has said that it has sent
        self._asked: dict[tuple[int, int], int] = {}  # to be told when more than that is sent
        self._waiting: defaultdict[int, deque[AnyReceive]] = defaultdict(deque)  # by tag
        self._ended: comm_core.Error | None = None

    def sends(self, peer: int, tag: int) -> None:
        """This rank sends a message. To be called once it is issued."""
        with self._lock:
            self._sent[peer, tag] += 1
            if (peer, tag) in self._asked:
                self._answer(peer, tag)

    def receives(self, peer: int, tag: int) -> None:
        """This rank receives a message from `peer`."""
        with self._lock:
            self._received[peer, tag] += 1

    def receive(self, one: AnyReceive, tag: int) -> None:
        """Let `one` begin with the first rank that has sent a message with this `tag`."""
        with self._lock:
            if self._ended is not None:
                one.fail(self._ended)
                return
            self._waiting[tag].append(one)
            if self._begin(tag):
                for peer in self._others:
                    self._ask(peer, tag)

    def hear(self, peer: int, letter: tuple[str, dict[int, int]]) -> None:
        """A letter of rank `peer`: counts of messages, by tags."""
        kind, counts = letter
        with self._lock:
            for tag, count in counts.items():
                if kind == "ask":
                    self._asked[peer, tag] = count
                    self._answer(peer, tag)
                else:
                    self._told[peer, tag] = count
                    if self._begin(tag):
                        self._ask(peer, tag)

    def leave(self) -> None:
        """Tell the other ranks what they have been sent: nobody answers them any more."""
        with self._lock:
            counts: defaultdict[int, dict[int, int]] = defaultdict(dict)
            for (peer, tag), count in self._sent.items():
                counts[peer][tag] = count
        for peer, sent in counts.items():
            self._tell(peer, ("sent", sent))

    def end(self, error: comm_core.Error) -> None:
        with self._lock:
            self._ended = error
            for waiting in self._waiting.values():
                while waiting:
                    waiting.popleft().fail(error)

    def _begin(self, tag: int) -> bool:
        """Begin what waits, with whoever has sent more than was received. Whether something still waits."""
        waiting = self._waiting[tag]
        for peer in self._others:
            while waiting and self._received[peer, tag] < self._told[peer, tag]:
                self._received[peer, tag] += 1
                waiting.popleft().begin(peer)
        return bool(waiting)

    def _ask(self, peer: int, tag: int) -> None:
        self._tell(peer, ("ask", {tag: self._received[peer, tag]}))

    def _answer(self, peer: int, tag: int) -> None:
        if self._sent[peer, tag] > self._asked[peer, tag]:
            del self._asked[peer, tag]
            self._tell(peer, ("sent", {tag: self._sent[peer, tag]}))
