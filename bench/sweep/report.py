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

__all__ = ["BUSY_MARK", "BUSY_NOTE", "bound_of", "markdown", "provenance", "write"]

_HEAD = (
    "| method | started by | bytes over | network | {unit}/sec | ± | step, median s | quartiles | steps | after steps |"
    " × L | n | optimizer state MB | peak MB | training MB | cores busy |\n" + "|---" * 16 + "|"
)
BUSY_MARK = "†"
BUSY_NOTE = (
    f"{BUSY_MARK} on a machine that others used before a run, or whose host gave its cores to other guests during one."
)
_LIMIT = (" of the limit |", "---|")  # a column more where rows have one
_CODE = (" code |", "---|")  # … where rows are of several


def _table(group: Group, code: bool) -> list[str]:
    lines = _HEAD.format(unit=group.rows[0].unit).splitlines()
    limited = any(row.limit_share is not None for row in group.rows)
    for more_columns in [_LIMIT] * limited + [_CODE] * code:
        lines = [line + more for line, more in zip(lines, more_columns, strict=True)]
    for row in sorted(group.rows, key=lambda row: row.median):
        ratio = group.to_bound(row)
        cells = [row.method + BUSY_MARK * row.busy, row.started_by, row.bytes_over, str(group.settings["network"])]
        cells += [f"{row.total:.1f}", f"{row.plus_minus:.1f}", f"{row.median:.3f}"]
        cells += [f"{row.low:.3f} – {row.high:.3f}", str(row.n)]
        cells += ["" if row.warmup_steps is None else str(row.warmup_steps)]
        cells += [ratio.cell, str(ratio.n)] if ratio else ["", str(len(row.runs))]
        cells += [f"{row.state_bytes / 2**20:.1f}", f"{row.peak_bytes / 2**20:.0f}"]
        cells += ["" if row.training_bytes is None else f"{row.training_bytes / 2**20:.0f}"]
        cells += ["" if row.cores_busy is None else f"{row.cores_busy:.0%}"]
        cells += [_percent(row.limit_share)] * limited
        cells += [row.origin] if code else []
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"


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
        lines += ["Steps are wall time on rank 0; rates are of all workers, undilated; L = max(compute, wire)."]
        lines += ["n is the number of processes that were run in turn; six and more have an interval of 95 %.", ""]
    for picture in pictures:
        lines += [f"![{picture.stem}]({picture.name})", ""]
    if verdicts:
        lines += ["## Bars", "", "| | |", "|---|---|"]
        marks = [verdict.word if verdict.passes else f"**{verdict.word}**" for verdict in verdicts]
        lines += [f"| {mark} | {verdict.text} |" for mark, verdict in zip(marks, verdicts, strict=True)]
        lines.append("")
    for group in groups:
        lines += [f"## {group.title}", "", *_table(group, len(origins) > 1), "", bound_of(group), ""]
    if any(row.busy for group in groups for row in group.rows):
        lines += [BUSY_NOTE, ""]
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
