"""The table of a comparison, and what it has to say line by line. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from tests.compare_horovod.difference import Difference
from tests.compare_horovod.judgement import Finding, Verdict

__all__ = ["report", "table"]

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
