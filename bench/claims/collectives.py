"""Views of single collectives (read ``docs/results/collectives``, else pure)."""

from __future__ import annotations

import json

from bench.claims.source import Source, table

__all__ = ["COLLECTIVES"]


def collectives(source: Source) -> str:
    """collectives NAME: ``docs/results/collectives/NAME.json``, as ``bench.collectives --json`` writes it, from 1 MB on."""
    found = json.loads((source.folder / "collectives" / f"{source.words[0]}.json").read_text())
    cells = []
    for row in found["rows"]:
        if row["bytes"] >= 2**20:
            figures = [row[name] for name in ("to_wire", "to_gloo", "cpu_to_gloo")]
            spread = f"{row['low_ms']:.2f} – {row['high_ms']:.2f}"
            size, ms = f"{row['bytes'] / 2**20:g} MB", f"{row['ms']:.2f}"
            texts = ["" if value is None else f"{value:.2f}" for value in figures]
            cells.append([row["operation"], size, str(row["n"]), ms, spread, *texts])
    head = ["operation", "size", "n", "ms", "quartiles", "× wire", "× gloo", "CPU × gloo"]
    where = f"{found['hosts']} hosts, {found['network']}, {found['backend']}"
    goodput = f", goodput {found['goodput'] * 8 / 1e6:.0f} Mbit/s" if found["goodput"] else ""
    return f"{where}{goodput}:\n\n{table(head, cells)}"


def rings(source: Source) -> str:
    """rings NAME …: large reduce-scatters and all-gathers of ``docs/results/collectives/NAME.json``, a line for each file.

    What a ring reaches of the goodput of plain TCP, with the largest operation that was measured.
    """
    cells = []
    for name in source.words:
        found = json.loads((source.folder / "collectives" / f"{name}.json").read_text())
        largest = max(row["bytes"] for row in found["rows"])
        rows = {row["operation"]: row for row in found["rows"] if row["bytes"] == largest}
        shares = [f"{1 / rows[one]['to_wire']:.2f}" for one in ("reduce_scatter", "all_gather")]
        busy = max(row["cores_busy"] for row in rows.values())
        goodput = f"{found['goodput'] * 8 / 1e9:.3g}"
        cells.append([found["network"], str(found["connections"]), goodput, *shares, f"{busy:.0%}"])
    head = [
        "network",
        "connections",
        "plain TCP, Gbit/s",
        "reduce-scatter, of that",
        "all-gather, of that",
        "cores busy",
    ]
    return table(head, cells)


COLLECTIVES = (collectives, rings)
