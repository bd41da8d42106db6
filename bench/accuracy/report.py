"""Compares methods that train differently: the loss on held-out data, over seeds, and the time to a loss. Pure.

A loss is the mean of `LONG_WINDOW` steps where steps are counted, and of a window of seconds where these are.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bench.accuracy import search
from bench.accuracy.curve import LONG_WINDOW, smooth, smooth_seconds, window_of
from bench.accuracy.ranks import compared, whose

__all__ = ["counted", "held_out", "markdown", "mean_and_spread", "reached", "seconds_to", "steps_to", "targets"]

_PERCENT = {"accuracy"}
_WHERE = (0.25, 0.5, 1.0)  # of the first method's steps: its losses there are what others are timed to

Run = Mapping[str, Any]


def mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and the standard deviation of so many seeds; 0 of one."""
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def targets(runs: Sequence[Run], window: float | None = None) -> list[float]:
    """Losses that these runs have reached, in the mean, after a quarter, after half and after all of their steps.

    `window`: of how many seconds a loss is the mean; None: of how many steps.
    """
    curves = [_smooth(run, window) for run in runs]
    return [statistics.mean(curve[round(where * len(curve)) - 1] for curve in curves) for where in _WHERE]


def _smooth(run: Run, window: float | None) -> list[float]:
    if window is None:
        return smooth(run["loss"], LONG_WINDOW)
    return smooth_seconds(run["loss"], run["seconds"], window)


def seconds_to(run: Run, loss: float, window: float) -> float | None:
    """The seconds until the mean loss of a `window` of seconds was as small for the first time; None: never."""
    for reached, seconds in zip(_smooth(run, window), run["seconds"], strict=True):
        if reached <= loss:
            return float(seconds)
    return None


def steps_to(run: Run, loss: float) -> float | None:
    """The number of steps until the mean loss of some steps was as small for the first time; None: never."""
    return next((float(step) for step, reached in enumerate(_smooth(run, None), 1) if reached <= loss), None)


def _in_words(values: Sequence[float | None], digits: int, sign: str = "") -> str:
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return f"{len(known)} of {len(values)} seeds" if known else "never"
    mean, spread = mean_and_spread(known)
    return f"{mean:{sign}.{digits}f}" + (f" ± {spread:.{digits}f}" if len(known) > 1 else "")


def held_out(methods: Mapping[str, Sequence[Run]]) -> list[list[str]]:
    """A table: means and standard deviations on data that was held out; empty if there was none.

    A loss beside the first method's is compared seed by seed.
    """
    first = next(iter(methods.values()))
    kinds = list(first[0].get("held_out", {}))
    if not kinds:
        return []
    rows = [["method", *(f"{kind}, %" if kind in _PERCENT else kind for kind in kinds), "loss, to the first's, %"]]
    for name, runs in methods.items():
        cells = [
            _in_words([100 * run["held_out"][kind] for run in runs], 1)
            if kind in _PERCENT
            else _in_words([run["held_out"][kind] for run in runs], 4)
            for kind in kinds
        ]
        pairs = zip((run["held_out"]["loss"] for run in runs), (run["held_out"]["loss"] for run in first), strict=False)
        changes = [100 * (loss / of - 1) for loss, of in pairs]
        rows.append([name, *cells, "" if runs is first else _in_words(changes, 1, "+")])
    return rows


def reached(methods: Mapping[str, Sequence[Run]], *, timed: bool) -> list[list[str]]:
    """A table: the steps or seconds until three losses of the first method are reached.

    Where seconds count, methods may have made other numbers of steps, which are told.
    """
    window = window_of([run for runs in methods.values() for run in runs]) if timed else None
    losses = targets(next(iter(methods.values())), window)

    def reach(run: Run, loss: float) -> float | None:
        return steps_to(run, loss) if window is None else seconds_to(run, loss, window)

    rows = [["method", *(f"{loss:.4g}" for loss in losses), *(["steps", "seconds of all"] if timed else [])]]
    for name, runs in methods.items():
        cells = [_in_words([reach(run, loss) for run in runs], 1 if timed else 0) for loss in losses]
        if timed:
            cells += [f"{len(runs[0]['loss']):,}", _in_words([run["seconds"][-1] for run in runs], 1)]
        rows.append([name, *cells])
    return rows


def counted(rows: Sequence[Sequence[str]], methods: Mapping[str, Sequence[Run]]) -> list[list[str]]:
    """The rows of a table of all methods, below its head, with the number of seeds in their last column."""
    numbers = ["n", *(str(len(runs)) for runs in methods.values())]
    return [[*row, number] for row, number in zip(rows, numbers, strict=True)]


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return ["| " + " | ".join(cells) + " |" for cells in lines]


def _rates(methods: Mapping[str, Sequence[Run]], searches: Mapping[str, search.Search]) -> list[str]:
    """What learning rates methods have taken, and why; nothing of earlier runs, which do not say."""
    if searches:
        return [search.told(searches), "", *_table(search.table(searches)), ""]
    rates = {run["rate"] for runs in methods.values() for run in runs if "rate" in run}
    return (
        [f"All methods have the task's learning rate, {', '.join(f'{rate:g}' for rate in sorted(rates))}.", ""]
        if rates
        else []
    )


def markdown(
    about: str,
    methods: Mapping[str, Sequence[Run]],
    *,
    timed: bool,
    searches: Mapping[str, search.Search] | None = None,
) -> str:
    """The report on the runs of each method, a run for each seed; the others are compared with the first method.

    `timed`: whether seconds say anything, as they do where ranks are on a network; else steps are counted. `searches`: of
    learning rates, by method, where they were searched.
    """
    runs = [run for several in methods.values() for run in several]
    lines = ["# Learned", "", about, ""]
    if max(map(len, methods.values())) > 1:
        lines += ["Means over n seeds, and standard deviations.", ""]
    lines += _rates(methods, searches or {})
    if rows := held_out(methods):
        lines += ["On data that was held out, after the last step, by the parameters that all ranks agree upon:", ""]
        lines += [*_table(counted(rows, methods)), ""]
    what = f"Seconds to a training loss ({whose(runs)}), the mean of {window_of(runs):.3g} seconds:"
    if not timed:
        what = f"Steps to a training loss ({whose(runs)}), the mean of {LONG_WINDOW} steps:"
    lines += [what, "", *_table(counted(reached(methods, timed=timed), methods)), ""]
    if rows := compared(methods):
        lines += [
            "Losses of every rank at every step, and a SHA-256 of all its parameters, compared bit by bit with those of "
            f"{next(iter(methods))}:",
            *("", *_table(rows), ""),
        ]
    return "\n".join(lines)
