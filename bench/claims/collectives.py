"""Views of single collectives (read ``docs/results/collectives``, else pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.claims.source import Source, table, with_interval
from bench.collectives.levels import LevelRow
from bench.sweep.ratios import Ratio
from bench.sweep.report import BUSY_MARK, BUSY_NOTE
from bench.train.cores import was_busy

__all__ = ["COLLECTIVES"]

_SENT = 64 * 2**10  # smaller messages wait for each other, not for the wire


def _noted(text: str) -> str:
    return f"{text}\n\n{BUSY_NOTE}" if BUSY_MARK in text else text


def collectives(source: Source) -> str:
    """collectives NAME: ``docs/results/collectives/NAME.json``, as ``bench.collectives --json`` writes it, from 1 MB on."""
    found = source.raw(f"collectives/{source.words[0]}.json")
    cells = []
    for row in found["rows"]:
        if row["bytes"] >= 2**20:
            figures = [
                _ratio(row.get(f"to_{name}"), row["n"], row.get(f"{name}_interval")) for name in ("plain", "gloo")
            ]
            spread = f"{row['low_ms']:.2f} – {row['high_ms']:.2f}"
            size, ms = f"{row['bytes'] / 2**20:g} MB", f"{row['ms']:.2f}"
            cells.append([row["operation"], size, str(row["n"]), ms, spread, *figures])
    head = ["operation", "size", "n", "ms", "quartiles", "× plain TCP", "× gloo"]
    where = f"{found['hosts']} hosts, {found['network']}, {found['backend']}{BUSY_MARK * was_busy(found)}"
    goodput = f", goodput {found['goodput'] * 8 / 1e6:.0f} Mbit/s" if found["goodput"] else ""
    return _noted(f"{where}{goodput}:\n\n{table(head, cells)}")


def rings(source: Source) -> str:
    """rings NAME …: reduce-scatters and all-gathers of ``docs/results/collectives/NAME.json``, a line for each size.

    What a ring reaches of plain TCP with the same messages, n times in one process.
    """
    cells = []
    for name in source.words:
        found = source.raw(f"collectives/{name}.json")
        for size in sorted({row["bytes"] for row in found["rows"]}):
            rows = {row["operation"]: row for row in found["rows"] if row["bytes"] == size}
            both = [rows[one] for one in ("reduce_scatter", "all_gather") if one in rows]
            if size < _SENT or len(both) < 2:
                continue
            shares = [_share(row) for row in both]
            busy = max(row["cores_busy"] for row in both)
            limit = max(_plain_bits(row) for row in both)
            network = found["network"] + BUSY_MARK * was_busy(found)
            place = [network, str(found["connections"]), _size(size), f"{limit / 1e9:.3g}"]
            cells.append([*place, *shares, str(min(row["n"] for row in both)), f"{busy:.0%}"])
    head = [
        "network",
        "connections",
        "size",
        "plain TCP, Gbit/s",
        "reduce-scatter, of that",
        "all-gather, of that",
        "repetitions",
        "cores busy",
    ]
    return table(head, cells)


def _ratio(value: float | None, n: int, interval: Sequence[float] | None) -> str:
    """A ratio as a cell, with its interval; empty where it was not measured."""
    if value is None:
        return ""
    return with_interval(Ratio(value, n, (interval[0], interval[1]) if interval else None)).cell


def _share(row: Mapping[str, Any]) -> str:
    """What a ring reaches of plain TCP, as a cell: the inverse of its time over that of plain TCP."""
    least, most = row["plain_interval"]
    return _ratio(1 / row["to_plain"], row["n"], (1 / most, 1 / least))


def _plain_bits(row: Mapping[str, Any]) -> float:
    """Bits per second of plain TCP with the same messages."""
    return float(row["bus_mb_per_s"] * 8e6 * row["ms"] / row["plain_ms"])


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**20:g} MB" if nbytes >= 2**20 else f"{nbytes / 2**10:g} KB"


def levels(source: Source) -> str:
    """levels NAME: two levels beside one ring, ``docs/results/collectives/NAME.json``, measured with --ranks-per-host."""
    found = source.raw(f"collectives/{source.words[0]}.json")
    cells = []
    for row in (LevelRow(**each) for each in found["rows"]):
        spread = f"{row.low_ms:.1f} – {row.high_ms:.1f}"
        figures = [f"{row.ms:.1f}", spread, f"{row.flat_ms:.1f}", _ratio(row.to_flat, row.n, row.flat_interval)]
        sent = [f"{mb:.1f}" for mb in (row.sent_mb, row.flat_sent_mb, row.hosts_sent_mb)]
        cells.append([row.operation, f"{row.bytes / 2**20:g} MB", str(row.n), *figures, *sent])
    head = ["operation", "size", "n", "two levels, ms", "quartiles", "one ring, ms", "× one ring"]
    head += ["a host sends, MB", "in one ring", "with one rank a host"]
    goodput = f", goodput {found['goodput'] * 8 / 1e6:.0f} Mbit/s" if found["goodput"] else ""
    where = f"{found['hosts']} hosts with {found['ranks_per_host']} ranks each, {found['network']}, {found['backend']}"
    where += BUSY_MARK * was_busy(found)
    return _noted(f"{where}{goodput}:\n\n{table(head, cells)}")


COLLECTIVES = (collectives, rings, levels)
