"""The state of a ``dear.run`` call: what its ranks have done, and whether it has failed; no processes, no clock."""

from __future__ import annotations

import math
from collections.abc import Mapping

from dearrun.errors import LaunchError, RankError
from dearrun.exchange import Answer, Hello, Lost
from overlap.transport import unpickling

__all__ = ["Course"]

_OTHERS_SECONDS = 2.0  # that others may say as well what they raised
_LOST_SECONDS = 10.0  # in which the launcher should have ended the job of a rank that has gone
_READ_SECONDS = 5.0  # that what ranks sent last is read after their launcher's end


class Course:
    """The course of a call by so many ranks, which have `start_timeout` seconds from `now` to connect."""

    def __init__(self, ranks: int, start_timeout: float, now: float) -> None:
        self._ranks, self._start_timeout = ranks, start_timeout
        self.answers: dict[int, Answer] = {}  # by rank
        self._present: set[int] = set()
        self._gone: set[int] = set()
        self._failed: int | None = None  # the first rank that has
        self._until = now + start_timeout
        self._ended: float | None = None  # when the launcher was first seen to have

    @property
    def all_returned(self) -> bool:
        """Whether each rank has answered with a result."""
        return len(self.answers) == self._ranks and self._failed is None

    def note(self, event: Hello | Answer | Lost, now: float) -> None:
        """Note what a rank has done. Raises :class:`LaunchError` where the launcher has started another job than it
        should have, or where a rank has started too late.
        """
        if isinstance(event, Hello):
            if event.size != self._ranks or event.rank in self._present:
                raise LaunchError(
                    f"{self._ranks} ranks were started, and one of them says that it is rank {event.rank} of {event.size}: "
                    "the mpirun is probably not of the MPI that comm_core was built with; see dearrun --check-build"
                )
            if self._failed is None and now >= self._until:
                raise self._missing(self._too_late)
            self._present.add(event.rank)
            if len(self._present) == self._ranks and self._failed is None:
                self._until = math.inf
        elif isinstance(event, Answer):
            self.answers[event.rank] = event
            if event.traceback:
                self._fail(event.rank, now + _OTHERS_SECONDS)
        else:
            self._gone.add(event.rank)
            if event.rank not in self.answers:
                self._fail(event.rank, now + _LOST_SECONDS)

    def _fail(self, rank: int, until: float) -> None:
        if self._failed is None:
            self._failed, self._until = rank, until

    def require(self, status: int | None, now: float) -> None:
        """Raise where the call has failed and nothing more is to be expected; `status` is the launcher's, if it has ended.

        To be called when there is no event to note.
        """
        if status is not None and self._ended is None:
            self._ended = now
        unread = self._present - self._gone - set(self.answers)
        ended = self._ended is not None and (not unread or now >= self._ended + _READ_SECONDS)
        if self._failed is not None and (ended or now >= self._until or len(self.answers) == self._ranks):
            raise self._error(self._failed, status)
        if not ended and now < self._until:
            return
        if len(self._present) < self._ranks:
            raise self._missing(f"their launcher ended with status {status}" if ended else self._too_late)
        raise self._error(min(set(range(self._ranks)) - set(self.answers)), status)

    @property
    def _too_late(self) -> str:
        return f"start_timeout={self._start_timeout:g} s are over"

    def _missing(self, why: str) -> LaunchError:
        missing = [rank for rank in range(self._ranks) if rank not in self._present]
        named = ", ".join(map(str, missing[:16])) + (", ..." if len(missing) > 16 else "")
        return LaunchError(
            f"{len(missing)} of {self._ranks} ranks did not start (ranks {named}): {why}; see what it printed"
        )

    def _error(self, failed: int, status: int | None) -> RankError:
        raised = {rank: answer for rank, answer in sorted(self.answers.items()) if answer.traceback}
        if failed in raised:
            said = (
                f"rank {failed} of {self._ranks} raised {raised[failed].summary}\n\n{raised[failed].traceback.rstrip()}"
            )
        else:
            ended = "" if status is None else f"; the job ended with status {status}"
            said = (
                f"rank {failed} of {self._ranks} ended without an answer{ended}: it was killed, or left by os._exit()"
            )
        also = [f"rank {rank}: {answer.summary}" for rank, answer in raised.items() if rank != failed]
        if also:
            said += "\n\nOther ranks raised, too:\n" + "\n".join(also)
        tracebacks = {rank: answer.traceback for rank, answer in raised.items()}
        return RankError(said, failed, _exceptions(raised), tracebacks)


def _exceptions(raised: Mapping[int, Answer]) -> dict[int, BaseException]:
    found: dict[int, BaseException] = {}
    for rank, answer in raised.items():
        try:
            found[rank] = unpickling.loads(answer.content)
        except Exception:
            found[rank] = RuntimeError(answer.summary)
    return found
