"""Decides whether any rank can still go on, from what every rank reports of itself (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from overlap.transport.encoding import travels
from overlap.transport.work import Line

__all__ = ["Standing", "Verdict", "absent", "behind", "verdict"]


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A rank's report of what it is doing. `lines` are by the communicators' names, which all of their ranks share."""

    text: str
    """In words."""
    still_seconds: float = 0.0
    """For how long its threads have been in operations of ours while nothing changed; 0: they are elsewhere."""
    quiet_seconds: float = 0.0
    """For how long it has issued, and finished, nothing at all, wherever its threads are."""
    stack: tuple[str, ...] = ()
    """Where its main thread is, the innermost line last, if that is outside of our functions."""
    lines: Mapping[str, Line] = field(default_factory=dict)
    undecided: int = 0
    """Operations by name that it has asked for, and some other rank has not."""
    can_be_told: bool = False
    """Whether all that it waits for is undecided, so that an exception reaches whoever waits."""

    @property
    def waits(self) -> bool:
        """Whether the rank waits for other ranks, as far as is known."""
        return self.undecided > 0 or any(line.unfinished for line in self.lines.values())


class Verdict(Enum):
    """The decision about a job that does not go on."""

    WAIT = "some rank may go on"
    RAISE = "no rank ever goes on, and all can be told so"
    ABORT = "no rank ever goes on"


def verdict(standings: Sequence[Standing], seconds: float) -> Verdict:
    """Judge a job by all of its ranks.

    No rank goes on by itself if each has stood still, inside an operation, for `seconds`; and none is helped by another if
    no operation has been issued by all ranks that take part in it, since such a one may be a long transfer.
    """
    if not standings or any(standing.still_seconds < seconds for standing in standings):
        return Verdict.WAIT
    names = {name for standing in standings for name in standing.lines}
    if any(_may_end([standing.lines[name] for standing in standings if name in standing.lines]) for name in names):
        return Verdict.WAIT
    if not any(standing.waits for standing in standings):
        return Verdict.WAIT  # they wait for something else, which we know nothing of
    return Verdict.RAISE if all(standing.can_be_told for standing in standings) else Verdict.ABORT


def behind(mine: Mapping[str, Line], others: Mapping[int, Mapping[str, Line]]) -> list[int]:
    """The ranks that have not come to an operation in which this rank waits, by its own lines and those of `others`."""
    waits = {name: line.oldest for name, line in mine.items() if line.unfinished}
    return sorted(
        rank
        for rank, lines in others.items()
        if any(name in waits and line.issued <= waits[name] for name, line in lines.items())
    )


def absent(answers: Mapping[int, Standing | None], awaited: Iterable[int], seconds: float) -> list[int]:
    """Ranks among `awaited` whose script was outside of our functions and issued nothing for `seconds`.

    Who waits itself is somebody else's to judge.
    """
    found = {rank: answer for rank in awaited if (answer := answers[rank]) is not None}
    return [rank for rank, answer in found.items() if answer.still_seconds == 0 and answer.quiet_seconds > seconds]


def _may_end(lines: Sequence[Line]) -> bool:
    """Whether every rank of a communicator has issued its oldest unfinished operation, and all mean the same by it."""
    waiting = [line for line in lines if line.unfinished]
    if not waiting:
        return False
    oldest = min(line.oldest for line in waiting)
    kinds = {line.unfinished[0] for line in waiting if line.oldest == oldest}
    return len(kinds) == 1 and all(line.issued > oldest for line in lines)
