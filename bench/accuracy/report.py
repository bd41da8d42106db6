"""Compares methods that train differently: the loss on held-out data, over seeds, and the time to a loss. Pure.

A loss is the mean of `LONG_WINDOW` steps.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bench.accuracy.curve import LONG_WINDOW, smooth

__all__ = ["held_out", "markdown", "mean_and_spread", "reached", "seconds_to", "steps_to", "targets"]

_PERCENT = {"accuracy"}
_WHERE = (0.25, 0.5, 1.0)  # of the first method's steps: its losses there are what others are timed to

Run = Mapping[str, Any]


def mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and the standard deviation of so many seeds; 0 of one."""
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def targets(runs: Sequence[Run]) -> list[float]:
    """Losses that these runs have reached, in the mean, after a quarter, after half and after all of their steps."""
    curves = [smooth(run["loss"], LONG_WINDOW) for run in runs]
    return [statistics.mean(curve[round(where * len(curve)) - 1] for curve in curves) for where in _WHERE]


def seconds_to(run: Run, loss: float) -> float | None:
    """The seconds until the mean loss of some steps was as small for the first time; None: never."""
    for reached, seconds in zip(smooth(run["loss"], LONG_WINDOW), run["seconds"], strict=True):
        if reached <= loss:
            return float(seconds)
    return None


def steps_to(run: Run, loss: float) -> float | None:
    """The number of steps until then."""
    curve = smooth(run["loss"], LONG_WINDOW)
    return next((float(step) for step, reached in enumerate(curve, 1) if reached <= loss), None)


def _in_words(values: Sequence[float | None], digits: int) -> str:
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return f"{len(known)} of {len(values)} seeds" if known else "never"
    mean, spread = mean_and_spread(known)
    return f"{mean:.{digits}f} ± {spread:.{digits}f}" if len(known) > 1 else f"{mean:.{digits}f}"


def held_out(methods: Mapping[str, Sequence[Run]]) -> list[list[str]]:
    """A table: means and standard deviations on data that was held out; empty if there was none."""
    first = next(iter(methods.values()))
    kinds = list(first[0].get("held_out", {}))
    if not kinds:
        return []
    reference = mean_and_spread([run["held_out"]["loss"] for run in first])[0]
    rows = [["method", *(f"{kind}, %" if kind in _PERCENT else kind for kind in kinds), "loss, to the first's"]]
    for name, runs in methods.items():
        cells = [
            _in_words([100 * run["held_out"][kind] for run in runs], 1)
            if kind in _PERCENT
            else _in_words([run["held_out"][kind] for run in runs], 4)
            for kind in kinds
        ]
        loss = mean_and_spread([run["held_out"]["loss"] for run in runs])[0]
        rows.append([name, *cells, f"{loss / reference - 1:+.1%}"])
    return rows


def reached(methods: Mapping[str, Sequence[Run]], *, timed: bool) -> list[list[str]]:
    """A table: the steps or seconds until three losses of the first method are reached.

    Where seconds count, methods may have made other numbers of steps, which are told.
    """
    losses = targets(next(iter(methods.values())))
    reach, digits = (seconds_to, 1) if timed else (steps_to, 0)
    rows = [["method", *(f"{loss:.3f}" for loss in losses), *(["steps", "seconds of all"] if timed else [])]]
    for name, runs in methods.items():
        cells = [_in_words([reach(run, loss) for run in runs], digits) for loss in losses]
        if timed:
            cells += [f"{len(runs[0]['loss']):,}", _in_words([run["seconds"][-1] for run in runs], 1)]
        rows.append([name, *cells])
    return rows


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return ["| " + " | ".join(cells) + " |" for cells in lines]


def markdown(about: str, methods: Mapping[str, Sequence[Run]], *, timed: bool) -> str:
    """The report on the runs of each method, a run for each seed; the others are compared with the first method.

    `timed`: whether seconds say anything, as they do where ranks are on a network; else steps are counted.
    """
    lines = ["# Learned", "", about, ""]
    if rows := held_out(methods):
        lines += ["On data that was held out, after the last step, by the parameters that all ranks agree upon:", ""]
        lines += [*_table(rows), ""]
    unit = "Seconds" if timed else "Steps"
    lines += [f"{unit} to a training loss, the mean of {LONG_WINDOW} steps on rank 0:", ""]
    return "\n".join([*lines, *_table(reached(methods, timed=timed)), ""])
