"""A difference that is meant, and whether it explains what was seen. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

__all__ = ["Difference", "Sighting", "explain"]


@dataclass(frozen=True)
class Sighting:
    """Where a difference shows, and what both sides say there.

    `subject` is ``group/call`` with ``*``; `theirs` and `ours` are regular expressions for the beginning of a line;
    `ranks`: only in jobs of so many; none: in all.
    """

    subject: str
    theirs: str = ""
    ours: str = ""
    ranks: tuple[int, ...] = ()

    def fits(self, subject: str, theirs: str, ours: str, ranks: int) -> bool:
        fitting = fnmatchcase(subject, self.subject) and (not self.ranks or ranks in self.ranks)
        return fitting and bool(re.match(self.theirs, theirs)) and bool(re.match(self.ours, ours))


@dataclass(frozen=True)
class Difference:
    """What docs/horovod.md calls `name`: the `reason`, in a sentence for users, and every place where it shows."""

    name: str
    reason: str
    sightings: tuple[Sighting, ...]


def explain(
    differences: Iterable[Difference], subject: str, pairs: Sequence[tuple[str, str]], ranks: int
) -> str | None:
    """The name of the first difference that explains all `pairs` of (theirs, ours) of a job with `ranks`; else None."""
    for difference in differences:
        if all(any(each.fits(subject, *pair, ranks) for each in difference.sightings) for pair in pairs):
            return difference.name
    return None
