"""Curves of several methods: how far their losses are apart step by step, who gets there first, and the picture."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

__all__ = ["apart", "draw", "report", "smooth"]

Curve = Mapping[str, Sequence[float]]
WINDOW = 5


def smooth(values: Sequence[float], window: int = WINDOW) -> list[float]:
    """Means over the last `window` values; of fewer at the beginning."""
    return [statistics.mean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]


def apart(curves: Mapping[str, Curve]) -> float:
    """The largest difference of losses between methods at the same step."""
    return max(max(losses) - min(losses) for losses in zip(*(curve["loss"] for curve in curves.values()), strict=True))


def report(curves: Mapping[str, Curve]) -> str:
    """A line for every method, and how far apart they are."""
    slowest = max(curve["seconds"][-1] for curve in curves.values())
    lines = [f"{'method':<28}{'last loss':>10}{'seconds':>9}{'of slowest':>12}"]
    for name, curve in sorted(curves.items(), key=lambda item: item[1]["seconds"][-1]):
        seconds = curve["seconds"][-1]
        lines.append(f"{name:<28}{smooth(curve['loss'])[-1]:>10.4f}{seconds:>9.1f}{seconds / slowest:>12.2f}")
    steps = len(next(iter(curves.values()))["loss"])
    lines.append(f"losses at the same step are at most {apart(curves):.2g} apart, over {steps} steps")
    return "\n".join(lines)


def draw(curves: Mapping[str, Curve], title: str, path: Path) -> None:
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    axis: Any = axes
    for name, curve in curves.items():
        axis.plot(curve["seconds"], smooth(curve["loss"]), label=name, lw=1.6)
    axis.set_xlabel("seconds")
    axis.set_ylabel(f"loss on rank 0, mean of {WINDOW} steps")
    axis.set_title(title, fontsize=10)
    axis.legend(frameon=False)
    axis.set_ylim(bottom=0)
    figure.savefig(path, dpi=120)
    plt.close(figure)
