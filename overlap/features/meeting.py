"""A call that every rank makes, and in which some ranks may have nothing to do: those ask the others before they go on.

All ranks run the same script, so they count the same calls. Who is asked answers once it comes to that call, or past it.
"""

from __future__ import annotations

import threading
import time

from overlap.core.attendance import Attendance
from overlap.transport.peer_queries import NoAnswer, PeerQueries

__all__ = ["Call", "Meeting"]

_ANSWER_SECONDS = 600.0
_LOOK_SECONDS = 1.0  # between looks at who has joined meanwhile

Call = tuple[int, float]  # a round, and the number of a call in it


class Meeting:
    """The calls of one kind on one optimizer, here on rank `rank` of the job; `topic` names them between ranks."""

    def __init__(self, rank: int, attendance: Attendance, peer_queries: PeerQueries, topic: str) -> None:
        self._rank, self._attendance, self._peer_queries, self._topic = rank, attendance, peer_queries, topic
        self._changed = threading.Condition()
        self.call: Call = (0, 0)  # how far this rank has come
        self._busy: Call | None = None  # where it last had something to do
        self._waiting: list[tuple[int, Call]] = []  # ranks that asked about a call to which this one had not come
        self._told: dict[Call, dict[int, bool]] = {}  # by call and rank: whether there was something to do
        peer_queries.on(topic, self._hear)
        peer_queries.on(f"{topic}/answer", self._hear_answer)

    def come_to(self, call: Call, busy: bool) -> None:
        """This rank is at `call` now, and has something to do there if `busy`."""
        with self._changed:
            self.call = call
            if busy:
                self._busy = call
            due = [(sender, asked) for sender, asked in self._waiting if asked <= call]
            self._waiting = [(sender, asked) for sender, asked in self._waiting if asked > call]
        for sender, asked in due:
            self._answer(sender, asked)

    def ask(self, call: Call, what: str) -> bool:
        """Whether any rank has something to do at `call`. Raises ``NoAnswer`` (about `what`) if that stays unknown."""
        others = [rank for rank in self._attendance.ranks if rank != self._rank]
        for rank in others:
            self._peer_queries.tell(rank, self._topic, call)
        deadline = time.monotonic() + _ANSWER_SECONDS
        with self._changed:
            while True:
                told = self._told.get(call, {})
                present = [self._attendance.ranks[index] for index in self._attendance.present(call[0])]
                silent = [rank for rank in others if rank in present and rank not in told]
                if any(told.values()) or not silent:
                    self._told.clear()
                    return any(told.values())
                if time.monotonic() > deadline:
                    raise NoAnswer(
                        f"{what}: ranks {silent} did not come to the same call within {_ANSWER_SECONDS:g} s; call it, and "
                        "step(), on every rank alike"
                    )
                self._changed.wait(_LOOK_SECONDS)

    def _hear(self, sender: int, asked: Call) -> None:
        with self._changed:
            if asked > self.call:
                self._waiting.append((sender, asked))
                return
        self._answer(sender, asked)

    def _answer(self, sender: int, asked: Call) -> None:
        self._peer_queries.tell(sender, f"{self._topic}/answer", (asked, self._busy == asked))

    def _hear_answer(self, sender: int, answer: tuple[Call, bool]) -> None:
        call, busy = answer
        with self._changed:
            self._told.setdefault(call, {})[sender] = busy
            self._changed.notify_all()
