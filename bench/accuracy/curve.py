"""Curves of several methods: how far their losses differ at each step, who gets to a loss first, and the picture."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.ticker import LogFormatter

from bench.accuracy.ranks import whose

__all__ = ["LONG_WINDOW", "apart", "draw", "report", "runs_of", "smooth", "smooth_seconds", "window_of"]

Curve = Mapping[str, Any]
WINDOW = 5
LONG_WINDOW = 25  # where losses of methods are not the same
_SECONDS = 0.05  # of the longest run: the window of means over seconds
_ALIKE = 0.1  # losses that are farther apart are
_COLORS = 10  # of matplotlib's cycle; more lines are dashed


def smooth(values: Sequence[float], window: int = WINDOW) -> list[float]:
    """Means over the last `window` values; of fewer at the beginning."""
    return [statistics.mean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]


def smooth_seconds(values: Sequence[float], seconds: Sequence[float], window: float) -> list[float]:
    """Means over what ended in the last `window` seconds; over fewer at the beginning.

    So methods whose steps take more or less time are averaged over the same time, and of each as many steps as it makes in
    that.
    """
    first, means = 0, []
    for end, now in enumerate(seconds, 1):
        while seconds[first] <= now - window:
            first += 1
        means.append(statistics.fmean(values[first:end]))
    return means


def runs_of(curves: Mapping[str, Curve]) -> list[Curve]:
    """All runs of all methods."""
    return [run for curve in curves.values() for run in curve.get("runs", [curve])]


def window_of(runs: Sequence[Curve]) -> float:
    """The seconds over which the losses of all these runs are averaged: a twentieth of the longest."""
    return _SECONDS * max(float(run["seconds"][-1]) for run in runs)


def apart(curves: Mapping[str, Curve]) -> float:
    """The largest difference of losses between methods at the same step, of those that all have made."""
    return max(max(losses) - min(losses) for losses in zip(*(curve["loss"] for curve in curves.values()), strict=False))


def report(curves: Mapping[str, Curve]) -> str:
    """A table with a line for every method, and how far their losses are apart."""
    slowest = max(curve["seconds"][-1] for curve in curves.values())
    lines = [f"{'method':<44}{'last loss':>10}{'steps':>7}{'seconds':>9}{'of slowest':>12}"]
    for name, curve in sorted(curves.items(), key=lambda item: item[1]["seconds"][-1]):
        seconds = curve["seconds"][-1]
        losses = curve["loss"]
        figures = f"{smooth(losses)[-1]:>10.4f}{len(losses):>7}{seconds:>9.1f}{seconds / slowest:>12.2f}"
        lines.append(f"{name:<44}{figures}")
    steps = min(len(curve["loss"]) for curve in curves.values())
    lines.append(f"losses at the same step are at most {apart(curves):.2g} apart, over {steps} steps")
    return "\n".join(lines)


def draw(curves: Mapping[str, Curve], title: str, path: Path, *, timed: bool) -> None:
    """Draw the loss over steps, methods with equal results as one line, and if `timed` over wall time beside it.

    Means are over steps there, and over seconds here: the same for all methods. Where results differ, they are over more
    steps, and the scale is logarithmic.
    """
    figure, panels = plt.subplots(
        1, 2 if timed else 1, figsize=(13 if timed else 11, 4.2), layout="constrained", sharey=True, squeeze=False
    )
    over_steps, over_time = panels[0, 0], panels[0, 1] if timed else None
    alike = apart(curves) < _ALIKE
    window, seconds = WINDOW if alike else LONG_WINDOW, window_of(runs_of(curves))
    slowest_first = sorted(curves.items(), key=lambda item: -item[1]["seconds"][-1])
    for place, (name, curve) in enumerate(slowest_first):
        losses = smooth(curve["loss"], window)
        # Lines that coincide stay visible: the first drawn is the widest.
        width = 1.4 + 2.0 * (len(curves) - 1 - place) if alike else 1.4
        line = over_steps.plot(
            range(1, len(losses) + 1), losses, lw=width, ls="-" if place < _COLORS else "--", label=name
        )[0]
        if over_time is None:
            continue
        losses = smooth_seconds(curve["loss"], curve["seconds"], seconds)
        over_time.plot(curve["seconds"], losses, lw=1.6, ls=line.get_linestyle(), color=line.get_color(), label=name)
        over_time.axvline(curve["seconds"][-1], color=line.get_color(), lw=0.8, ls=":")
    over_steps.set_xlabel("steps")
    if over_time is not None:
        over_time.set_xlabel("seconds; dotted: all steps done")
        over_time.set_title(f"means of {seconds:.3g} seconds", fontsize="small")
    over_steps.set_ylabel(f"loss, {whose(runs_of(curves))}")
    over_steps.set_title(f"means of {window} steps", fontsize="small")
    if alike:
        over_steps.set_ylim(bottom=0)
    else:
        over_steps.set_yscale("log")
        over_steps.yaxis.set_major_formatter(LogFormatter())  # 2, not 2 x 10^0
        over_steps.yaxis.set_minor_formatter(LogFormatter())
    # One legend for both panels, on the right, where no line is.
    panels[0, -1].legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=120)
    plt.close(figure)
