"""Draws steps of a recorded timeline: what was computed, what was waited for, and what was on the wire.

python -m overlap.trace.picture picture.png timeline-0.json timeline-1.json
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overlap.trace.events import MAIN_TRACK, Event

__all__ = ["Bar", "Row", "draw", "draw_rows", "rows_of"]

_COLOURS = {
    "forward": "#9ecae1",
    "backward": "#4292c6",
    "recompute": "#9e9ac8",
    "step": "#6a51a3",
    "wait": "#d7301f",
    "reduce_scatter": "#fd8d3c",
    "all_gather": "#41ab5d",
    "all_reduce": "#fdae6b",
}
_OTHER = "#969696"
_MARGIN = 0.1  # of the shown time: what goes on after the last step is shown this long
_SHOWN = 0.01  # of the bytes of the communicator that carried most: what carried less has no row
_CHARACTER = 0.0055  # of the picture's width: a label is on bars that are as wide as it


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar in the picture; milliseconds."""

    label: str
    kind: str
    start: float
    length: float


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the picture: bars side by side under one title."""

    title: str
    bars: tuple[Bar, ...]


def _ranks(files: Sequence[str]) -> dict[int, list[Event]]:
    by_rank: dict[int, list[Event]] = {}
    for file in files:
        for event in json.loads(Path(file).read_text()):
            by_rank.setdefault(event["pid"], []).append(event)
    return dict(sorted(by_rank.items()))


def _window(events: Sequence[Event], steps: int, skip: int, rank: int) -> tuple[float, float]:
    ends = sorted(
        event["ts"] + event["dur"] for event in events if event.get("cat") == "phase" and event["name"] == "step"
    )
    if len(ends) <= skip:
        raise ValueError(
            f"the timeline of rank {rank} holds {len(ends)} step(s), and {skip} of them are to be skipped: skip fewer, or "
            "record more"
        )
    begin = ends[skip - 1] if skip else min(event["ts"] for event in events if "ts" in event)
    return begin, ends[min(skip + steps, len(ends)) - 1]


def rows_of(by_rank: dict[int, list[Event]], steps: int, skip: int) -> list[Row]:
    """The rows to draw for each rank: phases, waits, and one for every communicator, but those of small messages (pure).

    Times count from the first rank's end of the step before; bars that reach beyond the last step are cut a little later.
    """
    windows = {rank: _window(events, steps, skip, rank) for rank, events in by_rank.items()}
    begin, end = min(first for first, _ in windows.values()), max(last for _, last in windows.values())

    cut = end + _MARGIN * (end - begin)

    def bars(events: list[Event]) -> tuple[Bar, ...]:
        return tuple(
            Bar(_label(event), _kind(event), (event["ts"] - begin) / 1e3, min(event["dur"], cut - event["ts"]) / 1e3)
            for event in events
            if event["ts"] < end and event["ts"] + event["dur"] > begin
        )

    rows = []
    for rank, events in by_rank.items():
        spans = [event for event in events if event["ph"] == "X"]
        main = [event for event in spans if event["tid"] == MAIN_TRACK]
        rows.append(Row(f"rank {rank}: compute", bars([event for event in main if event["cat"] == "phase"])))
        rows.append(Row("waits", bars([event for event in main if event["cat"] == "wait"])))
        wire = [event for event in spans if "bytes" in event.get("args", {})]
        carried = Counter[str]()
        for event in wire:
            carried[event["args"]["communicator"]] += event["args"]["bytes"]
        most = max(carried.values(), default=0)
        for name in (each for each, nbytes in carried.items() if nbytes >= _SHOWN * most):
            found = bars(_in_turn([event for event in wire if event["args"]["communicator"] == name]))
            if found:
                rows.append(Row(f"communication ({name})", found))
    return rows


def _in_turn(events: list[Event]) -> list[Event]:
    """One row for a communicator, which works in order of issue: each operation from the end of the one before it."""
    turns, free = [], 0.0
    for event in sorted(events, key=lambda event: event["ts"]):
        ended = event["ts"] + event["dur"]
        begun = min(max(event["ts"], free), ended)
        turns.append({**event, "ts": begun, "dur": ended - begun})
        free = max(free, ended)
    return turns


def _kind(event: Event) -> str:
    return event["name"].split()[0] if event["cat"] == "phase" else event["cat"]


def _label(event: Event) -> str:
    short = {"reduce_scatter": "RS", "all_gather": "AG", "all_reduce": "AR", "wait": "wait"}
    words = event["name"].split()
    if event["cat"] == "phase" and len(words) > 1:  # of a micro-batch: "forward 3"
        return f"{words[0][0].upper()}{words[1]}"
    return " ".join(short.get(word, word) for word in words)


def draw(files: Sequence[str], picture: str, steps: int, skip: int) -> None:
    """Draw timelines; see :func:`overlap.horovod.timeline.draw_timeline`."""
    draw_rows(rows_of(_ranks(files), steps, skip), picture)


def draw_rows(rows: Sequence[Row], picture: str) -> None:
    """Draw rows as a PNG. Raises ``ModuleNotFoundError`` without matplotlib."""
    try:
        import matplotlib as mpl
    except ModuleNotFoundError:
        raise ModuleNotFoundError("drawing needs matplotlib: pip install matplotlib") from None
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    end = max((bar.start + bar.length for row in rows for bar in row.bars), default=1.0)
    figure, axes = plt.subplots(figsize=(14, 1.0 + 0.5 * len(rows)))
    for index, row in enumerate(rows):
        for bar in row.bars:
            _draw_bar(axes, index, bar, end)
    axes.set_yticks(range(len(rows)), [row.title for row in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, end)
    axes.set_xlabel("ms")
    kinds = list(dict.fromkeys(bar.kind for row in rows for bar in row.bars))
    patches = [mpl.patches.Patch(color=_COLOURS.get(kind, _OTHER), label=kind.replace("_", "-")) for kind in kinds]
    axes.legend(handles=patches, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncol=len(patches), frameon=False)
    figure.tight_layout()
    figure.savefig(picture, dpi=110)
    plt.close(figure)


def _draw_bar(axes: Any, index: int, bar: Bar, end: float) -> None:
    colour = _COLOURS.get(bar.kind, _OTHER)
    axes.barh(index, bar.length, left=bar.start, height=0.8, color=colour, edgecolor="white", linewidth=0.4)
    begin, length = max(bar.start, 0.0), min(bar.start + bar.length, end) - max(bar.start, 0.0)
    if length > _CHARACTER * len(bar.label) * end:
        axes.text(begin + length / 2, index, bar.label, ha="center", va="center", fontsize=7, clip_on=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m overlap.trace.picture", description="Draw steps of a timeline.")
    parser.add_argument("picture", help="PNG to write")
    parser.add_argument("files", nargs="+", help="recorded timelines, one per rank")
    parser.add_argument("--steps", type=int, default=2, help="how many optimizer steps to show")
    parser.add_argument("--skip", type=int, default=1, help="how many to leave out first")
    args = parser.parse_args(argv)
    draw(args.files, args.picture, args.steps, args.skip)


if __name__ == "__main__":
    main()
