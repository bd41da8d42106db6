"""What is made of a comparison: equal, different as documented, or different without a word about it; the report. Pure."""

from __future__ import annotations

import enum
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from tests.compare_horovod.outcome import Kind, Likeness, Outcome, alike, alike_on_ranks

__all__ = ["Difference", "Finding", "Sighting", "Verdict", "explain", "explained", "judge", "report"]


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


_COLUMNS = {
    Verdict.EQUAL: "equal",
    Verdict.ROUNDED: "but for rounding",
    Verdict.DOCUMENTED: "as documented",
    Verdict.STOPPED: "Horovod stops",
    Verdict.UNDOCUMENTED: "not documented",
}


def table(findings: Sequence[Finding]) -> str:
    """A line for each part, in the order in which they came, and a total."""
    parts = list(dict.fromkeys(finding.part for finding in findings))
    counts = {part: Counter(each.verdict for each in findings if each.part == part) for part in parts}
    counts["all"] = Counter(finding.verdict for finding in findings)
    width = max(map(len, counts))
    head = f"{'':{width}}  compared  " + "  ".join(_COLUMNS.values())
    lines = [head]
    for part, count in counts.items():
        numbers = "  ".join(f"{count[verdict] or '-':>{len(text)}}" for verdict, text in _COLUMNS.items())
        lines.append(f"{part:{width}}  {count.total():>8}  {numbers}")
    return "\n".join(lines)


def report(findings: Sequence[Finding], differences: Iterable[Difference], ours: str, complete: bool = True) -> str:
    """The table; then the documented differences that were seen, where Horovod stopped, and what nobody wrote down.

    What was not seen is told of a `complete` comparison only.
    """
    seen = Counter(each.difference for each in findings if each.difference)
    names = [each.name for each in differences]
    known = [f"  {name}: {seen[name]}" for name in names if seen[name]]
    unseen = [name for name in names if not seen[name]]
    sections = [table(findings), "different as documented, and how often:", *known]
    if unseen and complete:
        sections.append(f"documented and not seen: {', '.join(unseen)}")
    for verdict, title in (
        (Verdict.STOPPED, f"Horovod crashed or hung here; {ours} answers:"),
        (Verdict.UNDOCUMENTED, "different, and not documented:"),
    ):
        found = [each for each in findings if each.verdict is verdict]
        if found:
            sections += [title, *(_told(each, ours) for each in found)]
    return "\n".join(sections)


def _told(finding: Finding, ours: str) -> str:
    width = max(len("Horovod"), len(ours))
    lines = [f"  {finding.part}: {finding.subject.partition('/')[2]}"]
    for one, other in finding.pairs:
        lines += [f"      {'Horovod':{width}}  {one}", f"      {ours:{width}}  {other}"]
    return "\n".join(lines)
