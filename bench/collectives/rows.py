"""Measurements of a collective as rows of a table (pure)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.sweep.ratios import interval

__all__ = ["Row", "row_of", "table"]


@dataclass(frozen=True)
class Row:
    """One line of the table; times in milliseconds, ratios below 1 are good."""

    operation: str
    bytes: int
    n: int
    ms: float
    low_ms: float  # quartiles of ours
    high_ms: float
    bus_mb_per_s: float
    gloo_ms: float | None
    to_gloo: float | None  # median of the ratios pair by pair
    to_wire: float | None
    cpu_to_gloo: float | None  # CPU per byte, ours to gloo's
    cpu_ns_per_byte: float
    cores_busy: float | None  # of the machine while ours ran, 0 to 1: near 1 they are the limit, not the links
    plain_ms: float | None = None  # plain TCP with the same messages in the same pattern; None: of an older run
    to_plain: float | None = None  # median of the ratios pair by pair
    # Where the medians of ratios lie (bench.sweep.ratios); None: fewer than six pairs, or an older run.
    gloo_interval: tuple[float, float] | None = None
    plain_interval: tuple[float, float] | None = None


def row_of(result: dict[str, Any], goodput_bytes: float | None) -> Row:
    ours, gloo, plain = (result["seconds"].get(who) for who in ("ours", "gloo", "plain"))
    cpu = {who: sum(values) / len(values) for who, values in result["cpu_seconds"].items()}
    crossing = result["bytes"] * result["wire_share"]
    middle = statistics.median(ours)
    quartiles = statistics.quantiles(ours, n=4, method="inclusive")
    wire = crossing / goodput_bytes if goodput_bytes and crossing else None
    to_gloo, to_plain = _pairwise(ours, gloo), _pairwise(ours, plain)
    return Row(
        operation=result["operation"],
        bytes=result["bytes"],
        n=len(ours),
        ms=1e3 * middle,
        low_ms=1e3 * quartiles[0],
        high_ms=1e3 * quartiles[2],
        bus_mb_per_s=crossing / middle / 1e6,
        gloo_ms=1e3 * statistics.median(gloo) if gloo else None,
        to_gloo=_median(to_gloo),
        to_wire=middle / wire if wire else None,
        cpu_to_gloo=cpu["ours"] / cpu["gloo"] if gloo and cpu["gloo"] else None,
        cpu_ns_per_byte=1e9 * cpu["ours"] / (crossing * result["ranks"]) if crossing else 0.0,
        cores_busy=result["cores_busy"],
        plain_ms=1e3 * statistics.median(plain) if plain else None,
        to_plain=_median(to_plain),
        gloo_interval=interval(to_gloo),
        plain_interval=interval(to_plain),
    )


def _pairwise(ours: Sequence[float], other: Sequence[float] | None) -> list[float]:
    return [a / b for a, b in zip(ours, other, strict=True)] if other else []


def _median(ratios: Sequence[float]) -> float | None:
    return statistics.median(ratios) if ratios else None


def _size(nbytes: int) -> str:
    for unit, factor in (("MB", 2**20), ("KB", 2**10)):
        if nbytes >= factor:
            return f"{nbytes / factor:g} {unit}"
    return f"{nbytes} B"


def table(rows: list[Row]) -> str:
    """The rows as text, one block per operation."""
    head = f"{'operation':<15}{'size':>8}{'n':>5}{'ms':>10}{'quartiles':>19}{'MB/s':>8}{'gloo ms':>10}"
    head += f"{'x gloo':>8}{'TCP ms':>10}{'x TCP':>8}{'x wire':>8}{'CPU x gloo':>12}{'ns/byte':>9}{'cores':>7}"
    lines = [head]
    for before, row in zip([None, *rows], rows, strict=False):
        if before is not None and before.operation != row.operation:
            lines.append("")

        def cell(value: float | None, width: int) -> str:
            return f"{value:{width}.2f}" if value is not None else f"{'n/a':>{width}}"

        spread = f"{row.low_ms:.2f} - {row.high_ms:.2f}"
        line = f"{row.operation:<15}{_size(row.bytes):>8}{row.n:>5}{row.ms:>10.2f}{spread:>19}"
        line += f"{row.bus_mb_per_s:>8.1f}{cell(row.gloo_ms, 10)}{cell(row.to_gloo, 8)}"
        line += f"{cell(row.plain_ms, 10)}{cell(row.to_plain, 8)}{cell(row.to_wire, 8)}"
        cores = f"{row.cores_busy:>7.0%}" if row.cores_busy is not None else f"{'n/a':>7}"
        lines.append(line + f"{cell(row.cpu_to_gloo, 12)}{row.cpu_ns_per_byte:>9.2f}{cores}")
    return "\n".join(lines)
