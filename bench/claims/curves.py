"""Views of training runs: losses over steps and seconds (read ``docs/results``, else pure)."""

from __future__ import annotations

import json
from typing import Any

from bench.accuracy.curve import apart
from bench.accuracy.report import held_out, reached
from bench.claims.source import Source, table
from bench.methods.spec import family_of
from bench.train.origin import UNCOMMITTED

__all__ = ["CURVES"]


def _curves(source: Source) -> dict[str, Any]:
    """The methods of ``docs/results/accuracy/TASK.json``. Raises ``ValueError`` unless one commit made them all."""
    found: dict[str, Any] = json.loads((source.folder / "accuracy" / f"{source.words[0]}.json").read_text())
    commits = {one["origin"]["commit"] for one in found.values()}
    if len(commits) > 1 or any(UNCOMMITTED in commit for commit in commits):
        raise ValueError(f"its curves are of {', '.join(sorted(commits))}, not of one commit")
    return found


def curves(source: Source) -> str:
    """curves TASK: seconds of every method of ``docs/results/accuracy/TASK.json``, and how far losses are apart."""
    found = _curves(source)
    ends = {name: curve["seconds"][-1] for name, curve in found.items()}
    difference = apart(found)
    first = min(ends, key=lambda name: not name.startswith("dear"))
    cells = [
        [f"`{name}`", f"{end:.1f}", f"{ends[first] / end:.2f}"]
        for name, end in sorted(ends.items(), key=lambda item: item[1])
    ]
    count = len(found[first]["loss"])
    text = table(["method", f"seconds for {count} steps", f"`{first}` / method"], cells)
    same = "the same in all bits" if difference == 0 else f"at most {difference:.2g} apart"
    return f"{text}\n\nLosses of rank 0 at the same step are {same}."


def curve(source: Source) -> str:
    """curve TASK MINE OTHER: the seconds of one method over those of the other, each with its fastest setting."""
    ends = [(family_of(name), one["seconds"][-1]) for name, one in _curves(source).items()]
    mine, other = (min(seconds for name, seconds in ends if name == wanted) for wanted in source.methods())
    return f"{mine / other:.2f}"


def _runs(source: Source) -> dict[str, Any]:
    """The runs of every method of ``docs/results/FILE.json``, by its name as a cell."""
    found = json.loads((source.folder / f"{source.words[0]}.json").read_text())
    named = {}
    for name, one in found.items():
        commits = [run.get("origin", one["origin"])["commit"] for run in one["runs"]]
        mark = "\\*" if any(UNCOMMITTED in commit for commit in commits) else ""
        named[f"`{name}`{mark}"] = one["runs"]
    return named


def learned(source: Source) -> str:
    """learned FILE: what methods of ``bench.accuracy`` are worth on data that was held out; its means over seeds."""
    head, *rows = held_out(_runs(source))
    return table(head, rows)


def seconds_to(source: Source) -> str:
    """seconds_to FILE: how long methods of ``bench.accuracy`` take to three losses of the first one."""
    head, *rows = reached(_runs(source), timed=True)
    return table(head, rows)


def steps(source: Source) -> str:
    """steps NAME METHOD: seconds of all steps of one method in ``docs/results/steps/NAME.json``."""
    courses = json.loads((source.folder / "steps" / f"{source.words[0]}.json").read_text())["courses"]
    found = [sum(course["seconds"]) for course in courses if course["method"] == source.words[1]]
    if not found:
        there = ", ".join(course["method"] for course in courses)
        raise ValueError(f"{source.words[0]} has no {source.words[1]}; it has {there}")
    return f"{found[0]:.0f}"


CURVES = (curve, curves, learned, seconds_to, steps)
