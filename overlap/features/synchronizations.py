"""Whether any rank has gradients in a synchronize() in which this rank has none.

[Note: who synchronizes without a gradient]
Before step(), synchronize() averages gradients, for which every rank is needed, one that used no parameter in this pass,
too: it may clip by the averaged gradients, and has to take the same step as the others. After step() there is nothing to
average anywhere. A rank without gradients cannot tell one from the other by what it has. It asks the others, if a
zero_grad() or a forward with gradients has begun another pass since the last step.
"""

from __future__ import annotations

import math

from overlap.core.attendance import Attendance
from overlap.features.meeting import Meeting
from overlap.transport.peer_queries import Mailroom

__all__ = ["Synchronizations"]


class Synchronizations:
    """Counts one optimizer's synchronize() calls, on rank `rank` of the job."""

    def __init__(self, rank: int, attendance: Attendance, mailroom: Mailroom) -> None:
        self._attendance = attendance
        self._meeting = Meeting(rank, attendance, mailroom, f"{attendance.topic}/synchronize")
        self.expecting = False  # another pass may have begun since the last step

    def meet(self, mine: bool) -> bool:
        """In synchronize(): whether any rank has gradients of this round; `mine` if this one does."""
        number, calls = self._meeting.call
        place = (self._attendance.round, calls + 1 if number == self._attendance.round else 1)
        self._meeting.come_to(place, mine)
        return mine or (
            self.expecting and self._meeting.ask(place, "synchronize() after a pass that used no parameter")
        )

    def step(self) -> None:
        """No synchronize() of this round follows here."""
        self._meeting.come_to((self._attendance.round, math.inf), False)
        self.expecting = False
