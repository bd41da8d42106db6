"""Whether the others drop gradients in a zero_grad() in which this rank has none to drop.

[Note: who skips a step without a gradient]
Where a step is skipped, zero_grad() completes the reductions that are under way. A rank that used no parameter in that pass
sees nothing to complete, and the others would wait for its part, or take its next gradients for it. All ranks run the same
script, so they count the same calls. A rank without gradients asks the others about its call, if a forward with gradients
ran since an earlier one and no step came between; they answer once they come there, or into a step.
"""

from __future__ import annotations

import math
import threading
import time

from overlap.attendance import Attendance
from overlap.mailroom import Mailroom, NoAnswer

__all__ = ["Skips"]

_ANSWER_SECONDS = 600.0
_LOOK_SECONDS = 1.0  # between looks at who has joined meanwhile

_Place = tuple[int, float]  # a round, and the number of a zero_grad() in it


class Skips:
    """Counts one optimizer's zero_grad() calls; `rank` is this one's in the job."""

    def __init__(self, rank: int, attendance: Attendance, mailroom: Mailroom) -> None:
        self._rank, self._attendance, self._mailroom = rank, attendance, mailroom
        self._topic = f"{attendance.topic}/skips"
        self.passed = False  # a forward with gradients ran since the last call
        self._changed = threading.Condition()
        self._place: _Place = (0, 0)  # how far this rank has come
        self._dropped: _Place | None = None  # where it last dropped gradients
        self._waiting: list[tuple[int, _Place]] = []  # ranks that asked about a place where this one was not yet
        self._told: dict[_Place, dict[int, bool]] = {}  # by place and rank: whether gradients were dropped there
        mailroom.on(self._topic, self._hear)
        mailroom.on(f"{self._topic}/answer", self._hear_answer)

    def meet(self, dropping: bool) -> bool:
        """In zero_grad(): whether any rank drops gradients of this round there; `dropping` if this one does."""
        number, calls = self._place
        calls = calls + 1 if number == self._attendance.round and math.isfinite(calls) else 1
        place = (self._attendance.round, calls)
        unsure = not dropping and self.passed and calls > 1
        self.passed = False
        self._come_to(place, dropping)
        found = dropping or (unsure and self._ask(place))
        if found:  # the round ends here, and this call begins the next one
            self._come_to((place[0] + 1, 1), dropping=False)
        return found

    def step(self) -> None:
        """What ends this round here is no zero_grad()."""
        self._come_to((self._attendance.round, math.inf), dropping=False)

    def _come_to(self, place: _Place, dropping: bool) -> None:
        with self._changed:
            self._place = place
            if dropping:
                self._dropped = place
            due = [(sender, asked) for sender, asked in self._waiting if asked <= place]
            self._waiting = [(sender, asked) for sender, asked in self._waiting if asked > place]
        for sender, asked in due:
            self._answer(sender, asked)

    def _hear(self, sender: int, asked: _Place) -> None:
        with self._changed:
            if asked > self._place:
                self._waiting.append((sender, asked))
                return
        self._answer(sender, asked)

    def _answer(self, sender: int, asked: _Place) -> None:
        self._mailroom.tell(sender, f"{self._topic}/answer", (asked, self._dropped == asked))

    def _hear_answer(self, sender: int, answer: tuple[_Place, bool]) -> None:
        place, dropped = answer
        with self._changed:
            self._told.setdefault(place, {})[sender] = dropped
            self._changed.notify_all()

    def _ask(self, place: _Place) -> bool:
        others = [rank for rank in self._attendance.ranks if rank != self._rank]
        for rank in others:
            self._mailroom.tell(rank, self._topic, place)
        deadline = time.monotonic() + _ANSWER_SECONDS
        with self._changed:
            while True:
                told = self._told.get(place, {})
                present = [self._attendance.ranks[index] for index in self._attendance.present(place[0])]
                silent = [rank for rank in others if rank in present and rank not in told]
                if any(told.values()) or not silent:
                    self._told.clear()
                    return any(told.values())
                if time.monotonic() > deadline:
                    raise NoAnswer(
                        f"zero_grad() after a pass that used no parameter: ranks {silent} did not come to the same call "
                        f"within {_ANSWER_SECONDS:g} s; call zero_grad() and step() on every rank alike"
                    )
                self._changed.wait(_LOOK_SECONDS)
