"""What two methods took in the same processes, and how far they are apart (pure)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.sweep.ratios import Ratio, interval
from bench.train.cores import told, worst

__all__ = ["METHODS", "Paired", "joined", "markdown"]

METHODS = ("first", "second")


@dataclass(frozen=True)
class Paired:
    """Blocks of steps of two methods, in turn: block n of the one was run beside block n of the other."""

    first: str
    second: str
    about: dict[str, Any]
    """Of both: task, workers, network, launcher, transport, steps in a block, how often the processes were started
    (``repeats``), the shares of busy cores before and while they ran (``busy_before``, ``cores_busy``), and the origin."""
    seconds: dict[str, list[float]]
    """Per step, by block: of ``"first"`` and ``"second"``; those of each start follow those of the one before."""
    cpu_seconds: dict[str, list[float]]
    """Processor time of rank 0 per step, of all its threads."""
    sent_bytes: dict[str, list[float]] = field(default_factory=dict)
    """That rank 0's host sent per step, by its link's counter; empty in files from before it was read."""

    @property
    def repeats(self) -> int:
        """How often the processes were started, each time for as many blocks."""
        return int(self.about.get("repeats", 1))

    def ratios(self, figure: str = "seconds") -> list[float]:
        """Of every block."""
        found = getattr(self, figure)
        return [mine / other for mine, other in zip(found["first"], found["second"], strict=True)]

    def ratio(self, figure: str = "seconds") -> Ratio:
        """The median of the first method's time over the second's, in blocks.

        Where processes were started several times, each start counts once, with the median of its blocks.
        """
        blocks = self.ratios(figure)
        each = len(blocks) // self.repeats
        starts = [statistics.median(blocks[at : at + each]) for at in range(0, len(blocks), each)]
        counted = starts if self.repeats > 1 else blocks
        return Ratio(statistics.median(counted), len(counted), interval(counted))

    @property
    def counted(self) -> str:
        """What n is the number of."""
        return "starts" if self.repeats > 1 else "blocks"


def joined(starts: Sequence[Paired]) -> Paired:
    """Several starts of the same as one."""
    first = starts[0]
    blocks = [
        {name: [block for one in starts for block in getattr(one, figure)[name]] for name in METHODS}
        for figure in ("seconds", "cpu_seconds", "sent_bytes")
        if getattr(first, figure)
    ]
    about = {**first.about, **worst([one.about for one in starts])}
    return Paired(first.first, first.second, {**about, "repeats": len(starts)}, *blocks)


def markdown(found: Paired) -> str:
    """A table, and the ratio with its interval."""
    about = found.about
    lines = [
        "| method | step, median ms | quartiles | blocks | processor ms | MB sent by a host |",
        "|---|---|---|---|---|---|",
    ]
    for name, spec in zip(METHODS, (found.first, found.second), strict=True):
        ms = [1e3 * one for one in found.seconds[name]]
        low, median, high = statistics.quantiles(ms, n=4)
        cpu = 1e3 * statistics.median(found.cpu_seconds[name])
        sent = f"{statistics.median(found.sent_bytes[name]) / 1e6:.2f}" if found.sent_bytes else ""
        lines.append(f"| `{spec}` | {median:.2f} | {low:.2f} – {high:.2f} | {len(ms)} | {cpu:.2f} | {sent} |")
    started = f"{about['launcher']}, bytes over {about['transport']}"
    busy = told(about.get("cores_busy"), about.get("busy_before"))
    ranks = about.get("ranks_per_host", 1)
    hosts = f"{about['workers']} hosts" + (f" × {ranks} ranks" if ranks > 1 else "")
    return "\n".join(
        [
            f"{about['task']} on {hosts}, {about['network']}, {started}; {about['steps']} steps a block, "
            f"{found.repeats} times started; {busy}:",
            "",
            *lines,
            "",
            f"`{found.first}` / `{found.second}`, n {found.counted}: {found.ratio().told}; "
            f"processor time: {found.ratio('cpu_seconds').told}.",
        ]
    )
