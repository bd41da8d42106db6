"""What is made of a comparison: equal, different as documented, or different without a word about it. Pure."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tests.compare_horovod.difference import Difference, explain
from tests.compare_horovod.likeness import Likeness, alike, alike_on_ranks
from tests.compare_horovod.outcome import Kind, Outcome

__all__ = ["Finding", "Verdict", "explained", "judge"]


class Verdict(enum.Enum):
    EQUAL = "equal"
    ROUNDED = "rounding"
    DOCUMENTED = "documented"
    STOPPED = "stopped"  # Horovod crashed or hung where ours answers
    UNDOCUMENTED = "undocumented"


@dataclass(frozen=True)
class Finding:
    """One subject (``group/call``) of a part of the comparison; `pairs` are the different answers, theirs and ours."""

    part: str
    subject: str
    verdict: Verdict
    difference: str | None = None
    pairs: tuple[tuple[str, str], ...] = ()


def judge(
    part: str, subject: str, theirs: Sequence[Outcome], ours: Sequence[Outcome], differences: Iterable[Difference]
) -> Finding:
    """Of one call, with an outcome of each rank on both sides."""
    likeness = alike_on_ranks(theirs, ours)
    if likeness is Likeness.EQUAL:
        return Finding(part, subject, Verdict.EQUAL)
    if likeness is Likeness.ROUNDED:
        return Finding(part, subject, Verdict.ROUNDED)
    different = [pair for pair in zip(theirs, ours, strict=False) if alike(*pair) is Likeness.DIFFERENT]
    pairs = tuple(dict.fromkeys((str(one), str(other)) for one, other in different))
    silent = (Kind.HUNG, Kind.CRASHED)
    if any(each.kind in silent for each in theirs) and not any(each.kind in silent for each in ours):
        return Finding(part, subject, Verdict.STOPPED, None, pairs)
    return explained(part, subject, pairs, differences, ranks=len(theirs))


def explained(
    part: str,
    subject: str,
    pairs: tuple[tuple[str, str], ...],
    differences: Iterable[Difference],
    ranks: int = 1,
) -> Finding:
    """Of answers that differ, theirs and ours, in a job of so many ranks."""
    name = explain(differences, subject, pairs, ranks)
    verdict = Verdict.DOCUMENTED if name else Verdict.UNDOCUMENTED
    return Finding(part, subject, verdict, name, pairs)
