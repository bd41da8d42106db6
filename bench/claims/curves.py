"""Views of training runs: losses over steps and seconds (read ``docs/results``, else pure)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from bench.accuracy.curve import apart
from bench.accuracy.ranks import alike, whose
from bench.accuracy.report import counted, held_out, reached
from bench.accuracy.stored import whole
from bench.claims.source import Source, table, with_interval
from bench.methods.spec import family_of
from bench.sweep.ratios import Ratio, paired
from bench.sweep.report import BUSY_MARK
from bench.train.cores import was_busy
from bench.train.origin import UNCOMMITTED

__all__ = ["CURVES"]


def _curves(source: Source) -> dict[str, Any]:
    """The methods of ``docs/results/accuracy/TASK.json``. Raises ``ValueError`` unless one commit made them all."""
    found = whole(source.raw(f"accuracy/{source.words[0]}.json"))
    commits = {one["origin"]["commit"] for one in found.values()}
    if len(commits) > 1 or any(UNCOMMITTED in commit for commit in commits):
        raise ValueError(f"its curves are of {', '.join(sorted(commits))}, not of one commit")
    return found


def _ends(curve: Mapping[str, Any]) -> dict[int, float]:
    """The seconds of all steps, by the number of a run."""
    return {number: run["seconds"][-1] for number, run in enumerate(curve.get("runs", [curve]))}


def _busy(curve: Mapping[str, Any]) -> str:
    """The mark of a curve of which others used the machine when one of its runs began."""
    return BUSY_MARK * any(was_busy(run) for run in curve.get("runs", []))


def _other(ratio: Ratio, itself: bool) -> str:
    return f"{ratio.value:.2f}" if itself else with_interval(ratio).cell


def curves(source: Source) -> str:
    """curves TASK: seconds of every method of ``docs/results/accuracy/TASK.json``, and how far losses are apart."""
    found = _curves(source)
    ends = {name: _ends(curve) for name, curve in found.items()}
    difference = apart(found)
    first = min(ends, key=lambda name: not name.startswith("dear"))
    ratios = {name: paired(ends[first], end) for name, end in ends.items()}
    cells = [
        [
            f"`{name}`{_busy(found[name])}",
            f"{statistics.median(ends[name].values()):.1f}",
            _other(ratio, name == first),
            str(ratio.n),
        ]
        for name, ratio in sorted(ratios.items(), key=lambda item: -item[1].value)
    ]
    count = len(found[first]["loss"])
    text = table(["method", f"seconds for {count} steps", f"`{first}` / method", "n"], cells)
    runs = [curve.get("runs", [curve]) for curve in found.values()]
    if all(alike(runs[0], other, what) for other in runs for what in ("loss", "parameters")):
        return f"{text}\n\nLosses of all ranks at the same step, and parameters at the end, are the same in all bits."
    same = "the same to the digits that were kept" if difference == 0 else f"at most {difference:.2g} apart"
    return f"{text}\n\nLosses ({whose([run for several in runs for run in several])}) at the same step are {same}."


def curve(source: Source) -> str:
    """curve TASK MINE OTHER: the seconds of one method over those of the other, each with its fastest setting."""
    curves = _curves(source)
    for run in (
        run for name, one in curves.items() if family_of(name) in source.methods() for run in one.get("runs", [])
    ):
        source.quiet(run)
    ends = [(family_of(name), _ends(one)) for name, one in curves.items()]
    sides = [[end for name, end in ends if name == wanted] for wanted in source.methods()]
    mine, other = (min(side, key=lambda end: statistics.median(end.values())) for side in sides)
    return with_interval(paired(mine, other)).told


def _runs(source: Source, *, timed: bool) -> dict[str, Any]:
    """The runs of every method of ``docs/results/FILE.json``, by its name as a cell."""
    found = whole(source.raw(f"{source.words[0]}.json"))
    named = {}
    for name, one in found.items():
        commits = [run.get("origin", one["origin"])["commit"] for run in one["runs"]]
        mark = "\\*" if any(UNCOMMITTED in commit for commit in commits) else ""
        named[f"`{name}`{mark}{_busy(one) if timed else ''}"] = one["runs"]
    return named


def _counted(source: Source, made: Callable[[Mapping[str, Sequence[Any]]], list[list[str]]], *, timed: bool) -> str:
    """A table with the number of seeds in its last column. Where it is `timed`, runs on a busy machine are marked."""
    runs = _runs(source, timed=timed)
    head, *rows = counted(made(runs), runs)
    return table(head, rows)


def learned(source: Source) -> str:
    """learned FILE: what methods of ``bench.accuracy`` are worth on data that was held out; its means over seeds."""
    return _counted(source, held_out, timed=False)


def seconds_to(source: Source) -> str:
    """seconds_to FILE: how long methods of ``bench.accuracy`` take to three losses of the first one."""
    return _counted(source, partial(reached, timed=True), timed=True)


def steps(source: Source) -> str:
    """steps NAME METHOD: seconds of all steps of one method in ``docs/results/steps/NAME.json``."""
    told = source.raw(f"steps/{source.words[0]}.json")
    source.quiet(told)
    courses = told["courses"]
    found = [sum(course["seconds"]) for course in courses if course["method"] == source.words[1]]
    if not found:
        there = ", ".join(course["method"] for course in courses)
        raise ValueError(f"{source.words[0]} has no {source.words[1]}; it has {there}")
    return f"{found[0]:.0f}"


CURVES = (curve, curves, learned, seconds_to, steps)
