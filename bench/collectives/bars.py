"""The goals that collectives have to reach, and whether a run did (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.collectives.rows import Row
from bench.sweep.ratios import Ratio

__all__ = ["BACKEND_BARS", "BACKEND_LEAST", "Verdict", "judge", "judge_backend"]

# Time over that of plain TCP with the same messages, for reduce_scatter and all_gather of 1 MB and more, by backend and
# number of hosts.
WIRE_BARS = {("mpi", 2): 1.08, ("mpi", 4): 1.25, ("tcp", 2): 1.05, ("tcp", 4): 1.25}
RINGS = ("reduce_scatter", "all_gather")
LARGE, WHOLE_WIRE = 256 * 2**10, 2**20
GLOO_LARGE, GLOO_SMALL, GLOO_CPU = 1.03, 1.5, 1.0
# Of torch.distributed over our backend: time over its time over gloo, whose reduce-scatter sends twice the bytes.
BACKEND_BARS = {"reduce_scatter": 0.55, "all_gather": 1.0, "all_reduce": 1.0}
BACKEND_LEAST = 64 * 2**10


@dataclass(frozen=True)
class Verdict:
    met: bool
    text: str


def _verdict(row: Row, what: str, value: float, bar: float, interval: tuple[float, float] | None = None) -> Verdict:
    ratio = Ratio(value, row.n, interval)
    return Verdict(value <= bar, f"{row.operation} {row.bytes / 1024:g} KB: {what} {ratio.told}, bar {bar:.2f}")


def judge(rows: Sequence[Row], hosts: int, backend: str) -> list[Verdict]:
    """A verdict for every row that a bar applies to."""
    verdicts = []
    wire_bar = WIRE_BARS.get((backend, hosts))
    for row in rows:
        if row.operation not in RINGS:
            continue
        # Between processes of one machine, plain TCP crosses no wire, and no goodput was measured.
        if wire_bar is not None and row.to_wire is not None and row.to_plain is not None and row.bytes >= WHOLE_WIRE:
            verdicts.append(_verdict(row, "time over plain TCP's", row.to_plain, wire_bar, row.plain_interval))
        if row.to_gloo is not None:
            bar = GLOO_LARGE if row.bytes >= LARGE else GLOO_SMALL
            verdicts.append(_verdict(row, "time over gloo's", row.to_gloo, bar, row.gloo_interval))
        if row.cpu_to_gloo is not None and row.bytes >= WHOLE_WIRE:
            verdicts.append(_verdict(row, "CPU over gloo's", row.cpu_to_gloo, GLOO_CPU))
    return verdicts


def judge_backend(rows: Sequence[Row]) -> list[Verdict]:
    """A verdict for every row of torch.distributed over our backend that a bar applies to."""
    return [
        _verdict(row, "time over gloo's", row.to_gloo, BACKEND_BARS[row.operation], row.gloo_interval)
        for row in rows
        if row.to_gloo is not None and row.operation in BACKEND_BARS and row.bytes >= BACKEND_LEAST
    ]
