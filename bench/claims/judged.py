"""The view of all bars: those of every sweep and of every file of collectives that is there (reads results, else pure)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.claims.ages import raw_files
from bench.claims.source import Source, table
from bench.collectives import bars
from bench.collectives.levels import LevelRow, judge_levels
from bench.collectives.rows import Row

__all__ = ["JUDGED"]


def _verdicts(name: str, found: dict[str, Any]) -> Iterator[tuple[bool | None, str]]:
    """What was judged of a file: whether it was met, and the words."""
    if name.endswith("/reports.json"):
        yield from ((one["met"], one["text"]) for one in found.get("bars", []))
    elif name.startswith("collectives/"):
        rows = found["rows"]
        if found.get("ranks_per_host", 1) > 1:
            judged = judge_levels([LevelRow(**row) for row in rows])
        else:
            several = [Row(**row) for row in rows]
            judged = (
                bars.judge_backend(several)
                if found["backend"] == "dear"
                else bars.judge(several, found["hosts"], found["backend"])
            )
        yield from ((one.met, one.text) for one in judged)


def all_bars(source: Source) -> str:
    """all_bars: how many bars each file of results has met and missed, and every bar that it missed."""
    cells, missed, sums = [], [], [0, 0, 0]
    for name in raw_files(source.folder):
        if not name.endswith("/reports.json") and not name.startswith("collectives/"):
            continue
        verdicts = list(_verdicts(name, source.raw(name)))
        if verdicts:
            counts = [sum(met is word for met, _ in verdicts) for word in (True, False, None)]
            sums = [total + count for total, count in zip(sums, counts, strict=True)]
            short = name.removesuffix("/reports.json").removesuffix(".json")
            cells.append([f"`{short}`", *map(str, counts)])
            missed += [f"* `{short}`: {text}" for met, text in verdicts if met is False]
    cells.append(["**all**", *(f"**{total}**" for total in sums)])
    text = table(["results", "met", "missed", "not judged"], cells)
    return "\n".join([text, "", "Missed:", "", *missed]) if missed else text


JUDGED = (all_bars,)
