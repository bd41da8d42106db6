"""What two methods took in the same processes, and how far they are apart (pure)."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

__all__ = ["METHODS", "Paired", "markdown"]

METHODS = ("first", "second")


@dataclass(frozen=True)
class Paired:
    """Blocks of steps of two methods, in turn: block n of the one was run beside block n of the other."""

    first: str
    second: str
    about: dict[str, Any]
    """Of both: task, workers, network, launcher, transport, steps in a block, and the origin."""
    seconds: dict[str, list[float]]
    """Per step, by block: of ``"first"`` and ``"second"``."""
    cpu_seconds: dict[str, list[float]]
    """Processor time of rank 0 per step, of all its threads."""

    def ratios(self, figure: str = "seconds") -> list[float]:
        found = getattr(self, figure)
        return [mine / other for mine, other in zip(found["first"], found["second"], strict=True)]

    def ratio(self, figure: str = "seconds") -> float:
        """The median over blocks of the first method's time over the second's."""
        return statistics.median(self.ratios(figure))


def markdown(found: Paired) -> str:
    """A table, and the ratio with its spread."""
    about = found.about
    lines = ["| method | step, median ms | quartiles | blocks | processor ms |", "|---|---|---|---|---|"]
    for name, spec in zip(METHODS, (found.first, found.second), strict=True):
        ms = [1e3 * one for one in found.seconds[name]]
        low, median, high = statistics.quantiles(ms, n=4)
        cpu = 1e3 * statistics.median(found.cpu_seconds[name])
        lines.append(f"| `{spec}` | {median:.2f} | {low:.2f} – {high:.2f} | {len(ms)} | {cpu:.2f} |")
    low, median, high = statistics.quantiles(found.ratios(), n=4)
    started = f"{about['launcher']}, bytes over {about['transport']}"
    return "\n".join(
        [
            f"{about['task']} on {about['workers']} hosts, {about['network']}, {started}; {about['steps']} steps a block:",
            "",
            *lines,
            "",
            f"`{found.first}` / `{found.second}`, block by block: {median:.3f} ({low:.3f} – {high:.3f}); "
            f"processor time: {found.ratio('cpu_seconds'):.3f}.",
        ]
    )
