"""Whether the others drop gradients in a zero_grad() in which this rank has none to drop.

[Note: who skips a step without a gradient]
Where a step is skipped, zero_grad() completes the reductions that are under way. A rank that used no parameter in that pass
sees nothing to complete, and the others would wait for its part, or take its next gradients for it. All ranks run the same
script, so they count the same calls. A rank without gradients asks the others about its call, if a forward with gradients
ran since an earlier one and no step came between; they answer once they come there, or into a step.

[Note: who skips a step alone]
Who drops a round that another rank steps with has other parameters from then on, and its later messages meet the other's
earlier ones. So whoever drops a round tells the others, which compare it with how they ended that round: at once, or when
they call step() or zero_grad() next. A rank that already waits for what the other never sends cannot raise, so it ends
the job.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable

from overlap.core.attendance import Attendance
from overlap.features.meeting import Meeting
from overlap.health.stacks import Place, places
from overlap.transport.peer_queries import PeerQueries

__all__ = ["Skips"]

log = logging.getLogger("dear")

_PATIENCE_SECONDS = 5.0  # of a rank that could end the job, and would rather raise
_REMEMBERED = 16  # rounds, looked through in every step; ranks are never that far apart


class Skips:
    """Counts one optimizer's zero_grad() calls; `rank` is this one's in the job, which `abort` ends."""

    def __init__(
        self, rank: int, attendance: Attendance, peer_queries: PeerQueries, abort: Callable[[int], None]
    ) -> None:
        self._rank, self._attendance, self._peer_queries, self._abort = rank, attendance, peer_queries, abort
        self._topic = f"{attendance.topic}/skips"
        self._meeting = Meeting(rank, attendance, peer_queries, self._topic)
        self.passed = False  # a forward with gradients ran since the last call
        self._stepped: deque[int] = deque(maxlen=_REMEMBERED)  # rounds that ended in a step here
        self._dropped_by: deque[tuple[int, int]] = deque(maxlen=_REMEMBERED)  # rounds, and who dropped them
        self._apart = ""  # what this rank was told of a round that it dropped alone
        self._raised = False
        peer_queries.on(f"{self._topic}/dropped", self._hear_drop)
        peer_queries.on(f"{self._topic}/apart", self._hear_apart)

    def meet(self, dropping: bool) -> bool:
        """In zero_grad(): whether any rank drops gradients of this round there; `dropping` if this one does.

        Raises ``RuntimeError`` where an earlier round was dropped on some ranks only.
        """
        self._check()
        number, calls = self._meeting.call
        calls = calls + 1 if number == self._attendance.round and math.isfinite(calls) else 1
        place = (self._attendance.round, calls)
        unsure = not dropping and self.passed and calls > 1
        self.passed = False
        self._meeting.come_to(place, dropping)
        found = dropping or (unsure and self._meeting.ask(place, "zero_grad() after a pass that used no parameter"))
        if found:  # the round ends here, and this call begins the next one
            self._tell_drop(place[0])
            self._meeting.come_to((place[0] + 1, 1), False)
        return found

    def drop(self) -> None:
        """In backward: the gradients of this round were dropped by something else than the optimizer's zero_grad().

        Raises as :meth:`meet` does.
        """
        self._check()
        self._tell_drop(self._attendance.round)

    def step(self) -> None:
        """What ends this round here is no zero_grad(), but for one after synchronize(). Raises as :meth:`meet` does."""
        self._check()
        self._meeting.come_to((self._attendance.round, math.inf), False)

    def stepped(self) -> None:
        """This round ends in a step here. Raises ``RuntimeError`` where another rank is known to have dropped it."""
        self._stepped.append(self._attendance.round)
        self._check()

    def _check(self) -> None:
        text = self._apart
        for number, rank in list(self._dropped_by):
            if number in self._stepped:
                text = self._conflict(number, rank)
                self._peer_queries.tell(rank, f"{self._topic}/apart", text)
        if text:
            self._raised = True
            raise RuntimeError(text)

    def _conflict(self, number: int, rank: int) -> str:
        return (
            f"rank {rank} has dropped the gradients of step {number} (zero_grad() before step()), and rank {self._rank} "
            "has stepped with them: their parameters differ from then on; skip a step on every rank, or on none"
        )

    def _tell_drop(self, number: int) -> None:
        """Before this rank's part of the round is complete, for which a rank that steps waits."""
        for rank in self._attendance.ranks:
            if rank != self._rank:
                self._peer_queries.tell(rank, f"{self._topic}/dropped", number)

    def _hear_drop(self, sender: int, number: int) -> None:
        self._dropped_by.append((number, sender))
        if number in self._stepped:
            self._insist(self._conflict(number, sender))

    def _insist(self, text: str) -> None:
        timer = threading.Timer(_PATIENCE_SECONDS, self._end_or_insist, [text])
        timer.daemon = True
        timer.start()

    def _end_or_insist(self, text: str) -> None:
        if self._raised:
            return
        main = threading.main_thread()
        if main.ident is not None and main.is_alive() and places([main.ident]) == {Place.INSIDE}:
            log.error("%s; aborting the job", text)
            self._abort(1)
        else:
            self._insist(text)

    def _hear_apart(self, _sender: int, text: str) -> None:
        self._apart = text
