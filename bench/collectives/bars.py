"""The goals that collectives have to reach, and whether a run did (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.collectives.rows import Row

__all__ = ["Verdict", "judge"]

# Time over wire time for reduce_scatter and all_gather of 1 MB and more, by backend and number of hosts.
WIRE_BARS = {("mpi", 2): 1.08, ("mpi", 4): 1.25, ("tcp", 2): 1.05, ("tcp", 4): 1.25}
RINGS = ("reduce_scatter", "all_gather")
LARGE, WHOLE_WIRE = 256 * 2**10, 2**20
GLOO_LARGE, GLOO_SMALL, GLOO_CPU = 1.03, 1.5, 1.0


@dataclass(frozen=True)
class Verdict:
    met: bool
    text: str


def _verdict(row: Row, what: str, value: float, bar: float) -> Verdict:
    return Verdict(value <= bar, f"{row.operation} {row.bytes / 1024:g} KB: {what} {value:.2f}, bar {bar:.2f}")


def judge(rows: Sequence[Row], hosts: int, backend: str) -> list[Verdict]:
    """A verdict for every row that a bar applies to."""
    verdicts = []
    wire_bar = WIRE_BARS.get((backend, hosts))
    for row in rows:
        if row.operation not in RINGS:
            continue
        if wire_bar is not None and row.to_wire is not None and row.bytes >= WHOLE_WIRE:
            verdicts.append(_verdict(row, "time over wire time", row.to_wire, wire_bar))
        if row.to_gloo is not None:
            bar = GLOO_LARGE if row.bytes >= LARGE else GLOO_SMALL
            verdicts.append(_verdict(row, "time over gloo's", row.to_gloo, bar))
        if row.cpu_to_gloo is not None and row.bytes >= WHOLE_WIRE:
            verdicts.append(_verdict(row, "CPU over gloo's", row.cpu_to_gloo, GLOO_CPU))
    return verdicts
