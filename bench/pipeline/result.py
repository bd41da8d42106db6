"""What pipelines took in the same processes, in turn (pure)."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from pipe.schedule import bubble

__all__ = ["METHODS", "Pipelines", "markdown"]

METHODS = {
    "dear": "pipe.Pipe, dear along the data axis",
    "ddp": "torch's pipelining, stages in DDP",
    "ddp-over-dear": "the same over the backend dear",
}


@dataclass(frozen=True)
class Pipelines:
    """Blocks of steps of each method: block n of the one was run beside block n of the other.

    `computing`: seconds of a step in which a stage computed, as measured: the mean of all stages, which take as long.
    """

    about: dict[str, Any]
    """Stages, micro-batches, schedule, data-parallel ranks, network, MB of a stage, and the origin."""
    computing: float
    seconds: dict[str, list[float]]

    @property
    def floor(self) -> float:
        """Seconds of computation and of its bubble, and nothing else."""
        return self.computing / (1 - bubble(self.about["chunks"], self.about["stages"]))

    def idle(self, name: str) -> float:
        """The share of a step in which a stage does not compute."""
        return 1 - self.computing / statistics.median(self.seconds[name])

    def outside(self, name: str) -> float:
        """The share of a step that is neither computation nor its bubble."""
        return 1 - self.floor / statistics.median(self.seconds[name])

    def ratios(self, name: str = "dear") -> list[float]:
        """The time of that method over that of `ddp`, block by block."""
        return [mine / other for mine, other in zip(self.seconds[name], self.seconds["ddp"], strict=True)]


def markdown(found: Pipelines) -> str:
    """A table, and the ratio with its spread."""
    about = found.about
    lines = [
        "| method | step, median ms | quartiles | idle | outside bubble and computation |",
        "|---|---|---|---|---|",
    ]
    for name, seconds in found.seconds.items():
        low, median, high = (1e3 * each for each in statistics.quantiles(seconds, n=4))
        lines.append(
            f"| {METHODS[name]} | {median:.1f} | {low:.1f} – {high:.1f} | {100 * found.idle(name):.1f} % | "
            f"{100 * found.outside(name):.1f} % |"
        )
    share = bubble(about["chunks"], about["stages"])
    told = [
        f"{about['stages']} stages of {about['mb']:g} MB × {about['data']} ranks, {about['chunks']} micro-batches, "
        f"{about['schedule']}, {about['network']}; a stage computes for {1e3 * found.computing:.1f} ms of a step, and the "
        f"bubble is {100 * share:.1f} % ({1e3 * found.floor:.1f} ms):",
        "",
        *lines,
    ]
    for name in [name for name in found.seconds if name != "ddp" and "ddp" in found.seconds]:
        ratios = found.ratios(name)
        low, median, high = statistics.quantiles(ratios, n=4)
        told += ["", f"`{name}` / `ddp`, block by block: {median:.3f} ({low:.3f} – {high:.3f}), n = {len(ratios)}."]
    return "\n".join(told)
