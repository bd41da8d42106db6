"""Views of the published experiments (read ``docs/results/osdp``, else pure)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from bench.claims.source import Source, table
from bench.train.origin import UNCOMMITTED

__all__ = ["EXPERIMENTS", "difference", "rendered"]


def difference(runs: Sequence[dict[str, Any]]) -> float:
    """The most that losses of one step differ between runs, of the first one's, in the steps that all have."""
    steps = list(zip(*(run["losses"] for run in runs), strict=False))
    return max(abs(loss - losses[0]) / abs(losses[0]) for losses in steps for loss in losses)


def rendered(found: dict[str, Any]) -> str:
    """What ``python -m bench.experiments`` measured, as Markdown: a line for each mode."""
    runs = found["runs"]
    limited = any(run["limit_bytes"] is not None for run in runs)
    linked = any(run["sent_bytes"] is not None for run in runs)
    head = ["", "samples/s", "step, median s", "n", "memory of a rank, GB"]
    head += [
        *(["of the limit"] if limited else []),
        *(["a host sends in a step, MB"] if linked else []),
        "loss at the end",
    ]
    mark = "\\*" if UNCOMMITTED in found["origin"]["commit"] else ""
    cells = []
    for run in runs:
        seconds = run["step_seconds"]
        row = [f"{run['mode']}{mark}", f"{run['samples'] * len(seconds) / sum(seconds):.3g}"]
        row += [f"{statistics.median(seconds):.3f}", str(len(seconds)), f"{run['peak_bytes'] / 2**30:.3f}"]
        if limited:
            limit = run["limit_bytes"]
            row.append("" if limit is None else f"{100 * run['peak_bytes'] / limit:.1f} %")
        if linked:
            row.append("" if run["sent_bytes"] is None else f"{run['sent_bytes'] / 1e6:,.0f}")
        cells.append([*row, f"{run['losses'][min(len(each['losses']) for each in runs) - 1]:.6f}"])
    first = runs[0]
    hosts = f"{first['hosts']} hosts with {first['ranks'] // first['hosts']} ranks each, {found['network']}"
    where = hosts if first["hosts"] > 1 else f"{first['ranks']} ranks on one machine"
    about = f"{first['parameters'] / 1e6:,.1f} M parameters: {first['model']}; {where}."
    most = difference(runs)
    same = f"differ by {most:.0e} of their values at most" if most else "are equal in every digit"
    return f"{table(head, cells)}\n\n{about} Losses of the same step {same}."


def experiment(source: Source) -> str:
    """experiment NAME: ``docs/results/osdp/NAME.json``, as ``bench.experiments --json`` writes it."""
    return rendered(source.raw(f"osdp/{source.words[0]}.json"))


EXPERIMENTS = (experiment,)
