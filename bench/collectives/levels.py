"""Two levels beside one ring of all ranks, on hosts with several ranks each: rows, their table, and the goals (pure).

levels    within hosts, and once between them: comm.two_level(hosts)
flat      one ring of all ranks
hosts     the same operation among one rank of each host: what two levels should send between hosts
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.collectives.bars import Verdict
from bench.sweep.ratios import Ratio, interval

__all__ = ["LEVELLED", "LevelRow", "judge_levels", "level_row", "level_table"]

#: Operations that go in two levels.
LEVELLED = ("reduce_scatter", "all_gather", "all_reduce")
TIME_BAR, BYTES_BAR = 0.75, 1.03  # over the flat ring's time; over the bytes of one rank of each host
_WHOLE_WIRE = 2**20


@dataclass(frozen=True)
class LevelRow:
    """One line of the table; times in milliseconds, bytes in MB (10^6) that the busiest host sent in one operation."""

    operation: str
    bytes: int
    n: int
    ms: float
    low_ms: float  # quartiles of two levels
    high_ms: float
    flat_ms: float
    hosts_ms: float
    to_flat: float  # median of the ratios pair by pair
    sent_mb: float
    flat_sent_mb: float
    hosts_sent_mb: float
    flat_interval: tuple[float, float] | None = None  # where the median of to_flat lies; None: fewer than six pairs

    @property
    def to_hosts(self) -> float:
        """Bytes between hosts over those of one rank of each."""
        return self.sent_mb / self.hosts_sent_mb


def level_row(result: dict[str, Any]) -> LevelRow:
    seconds, sent = result["seconds"], result["sent"]
    quartiles = statistics.quantiles(seconds["levels"], n=4, method="inclusive")
    ratios = [levels / flat for levels, flat in zip(seconds["levels"], seconds["flat"], strict=True)]
    return LevelRow(
        operation=result["operation"],
        bytes=result["bytes"],
        n=len(ratios),
        ms=1e3 * statistics.median(seconds["levels"]),
        low_ms=1e3 * quartiles[0],
        high_ms=1e3 * quartiles[2],
        flat_ms=1e3 * statistics.median(seconds["flat"]),
        hosts_ms=1e3 * statistics.median(seconds["hosts"]),
        to_flat=statistics.median(ratios),
        sent_mb=statistics.median(sent["levels"]) / 1e6,
        flat_sent_mb=statistics.median(sent["flat"]) / 1e6,
        hosts_sent_mb=statistics.median(sent["hosts"]) / 1e6,
        flat_interval=interval(ratios),
    )


def level_table(rows: Sequence[LevelRow]) -> str:
    """The rows as text."""
    lines = [
        f"{'operation':<15}{'MB':>7}{'n':>5}{'ms':>10}{'quartiles':>19}{'flat ms':>10}{'x flat':>8}"
        f"{'sent MB':>10}{'flat':>8}{'a rank a host':>15}{'x':>6}"
    ]
    for row in rows:
        spread = f"{row.low_ms:.2f} - {row.high_ms:.2f}"
        lines.append(
            f"{row.operation:<15}{row.bytes / 2**20:>7g}{row.n:>5}{row.ms:>10.2f}{spread:>19}{row.flat_ms:>10.2f}"
            f"{row.to_flat:>8.2f}{row.sent_mb:>10.2f}{row.flat_sent_mb:>8.2f}{row.hosts_sent_mb:>15.2f}{row.to_hosts:>6.2f}"
        )
    return "\n".join(lines)


def judge_levels(rows: Sequence[LevelRow]) -> list[Verdict]:
    """Two verdicts for every row of 1 MB and more: its time, and its bytes between hosts."""
    verdicts = []
    for row in rows:
        if row.bytes >= _WHOLE_WIRE:
            what = f"{row.operation} {row.bytes / 1024:g} KB in two levels:"
            ratio = Ratio(row.to_flat, row.n, row.flat_interval)
            time = f"{what} time over the flat ring's {ratio.told}, bar {TIME_BAR:.2f}"
            sent = f"{what} bytes between hosts over a rank a host's {row.to_hosts:.3f}, bar {BYTES_BAR:.2f}"
            verdicts += [Verdict(row.to_flat <= TIME_BAR, time), Verdict(row.to_hosts <= BYTES_BAR, sent)]
    return verdicts
