"""The results of a sweep as ``reports.json`` and ``reports.md``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.sweep.bars import Verdict
from bench.sweep.failures import Failure
from bench.sweep.summary import Group
from bench.train.origin import origin_of

__all__ = ["bound_of", "markdown", "provenance", "write"]

_HEAD = (
    "| method | {unit}/sec | ± | step, median s | quartiles | n | after steps | × L | optimizer state MB | peak MB |"
    " training MB |\n" + "|---" * 11 + "|"
)
_CODE = (" code |", "---|")  # a column more where rows are of several


def _table(group: Group, code: bool) -> list[str]:
    lines = _HEAD.format(unit=group.rows[0].unit).splitlines()
    if code:
        lines = [line + more for line, more in zip(lines, _CODE, strict=True)]
    for row in sorted(group.rows, key=lambda row: row.median):
        bound = f"{row.median / group.bound:.2f}" if group.bound else ""
        cells = [row.method, f"{row.total:.1f}", f"{row.plus_minus:.1f}", f"{row.median:.3f}"]
        cells += [f"{row.low:.3f} – {row.high:.3f}", str(row.n)]
        cells += ["" if row.warmup_steps is None else str(row.warmup_steps), bound]
        cells += [f"{row.state_bytes / 2**20:.1f}", f"{row.peak_bytes / 2**20:.0f}"]
        cells += ["" if row.training_bytes is None else f"{row.training_bytes / 2**20:.0f}"]
        cells += [row.origin] if code else []
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def bound_of(group: Group) -> str:
    """The lower bound of a group and what it is made of, as a sentence."""
    if group.bound is None or group.compute is None:
        return "No lower bound: the method `none` was not run."
    if group.wire is None:
        return f"L = {group.bound:.3f} s, the computation; the network's goodput was not measured."
    ratio = group.wire / group.compute
    return (
        f"L = {group.bound:.3f} s: compute {group.compute:.3f} s, wire {group.wire:.3f} s (wire/compute {ratio:.2f})."
    )


def _failed(failure: Failure) -> str:
    about = failure.settings
    text = f"* {about.method}, {about.emulate_compute or about.model}, {about.workers} workers, {about.network}: "
    return text + failure.reason + (f" (tried {failure.tries} times)" if failure.tries else "")


def _unique(results: Sequence[dict[str, Any]], name: str) -> str:
    return ", ".join(sorted({str(result["versions"].get(name, "unknown")) for result in results}))


def provenance(results: Sequence[dict[str, Any]]) -> str:
    """How many runs of which code on which machine, as a sentence."""
    origins = sorted({str(origin_of(result)) for result in results})
    machine = [f"{name} {_unique(results, name)}" for name in ("python", "system", "cores")]
    return f"{len(results)} runs; commit {' / '.join(origins)}; {'; '.join(machine)}."


def markdown(
    title: str,
    results: Sequence[dict[str, Any]],
    groups: Sequence[Group],
    verdicts: Sequence[Verdict],
    failures: Sequence[Failure],
    pictures: Sequence[Path],
) -> str:
    """The whole report; `pictures` are referred to by their file names."""
    lines = [f"# {title or 'Benchmarks'}", ""]
    origins = sorted({str(origin_of(result)) for result in results})
    if results:
        lines += [provenance(results), ""]
        lines += ["Steps are wall time on rank 0; rates are of all workers, undilated; L = max(compute, wire).", ""]
    for picture in pictures:
        lines += [f"![{picture.stem}]({picture.name})", ""]
    if verdicts:
        lines += ["## Bars", "", "| | |", "|---|---|"]
        marks = [verdict.word if verdict.passes else f"**{verdict.word}**" for verdict in verdicts]
        lines += [f"| {mark} | {verdict.text} |" for mark, verdict in zip(marks, verdicts, strict=True)]
        lines.append("")
    for group in groups:
        lines += [f"## {group.title}", "", *_table(group, len(origins) > 1), "", bound_of(group), ""]
    if failures:
        lines += ["## Without a result", ""]
        lines += [_failed(failure) for failure in failures]
        lines.append("")
    return "\n".join(lines)


def write(
    folder: Path,
    title: str,
    results: Sequence[dict[str, Any]],
    groups: Sequence[Group],
    verdicts: Sequence[Verdict],
    failures: Sequence[Failure],
    pictures: Sequence[Path],
) -> None:
    """Write both files into `folder`."""
    data = {
        "title": title,
        "bars": [asdict(verdict) for verdict in verdicts],
        "failures": [
            {"settings": one.settings.to_dict(), "reason": one.reason, "tries": one.tries} for one in failures
        ],
        "runs": list(results),
    }
    (folder / "reports.json").write_text(json.dumps(data, indent=1))
    (folder / "reports.md").write_text(markdown(title, results, groups, verdicts, failures, pictures))
