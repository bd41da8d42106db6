"""Reports on pairs of runs: each method's step time, their ratio, and the losses side by side (pure)."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bench.sweep.ratios import Ratio, paired

__all__ = ["of_pair", "of_search", "ratio", "report", "side", "step_seconds"]

Curve = Mapping[str, Any]
WARMUP = 2  # steps in which buckets are made, by DDP as by dear
SHOWN = 10


def step_seconds(curve: Curve) -> float:
    """The median time of a step, without the first ones."""
    ended = curve["seconds"]
    return statistics.median(after - before for before, after in zip(ended[WARMUP - 1 :], ended[WARMUP:], strict=False))


def side(pairs: Sequence[Mapping[str, Curve]], name: str) -> float:
    """The median of a side's runs, ``"dear"`` or ``"ddp"``, each with the median time of its steps."""
    return statistics.median(step_seconds(pair[name]) for pair in pairs)


def ratio(pairs: Sequence[Mapping[str, Curve]]) -> Ratio:
    """Of a step with dear, in the library's own DDP's."""
    times = ({number: step_seconds(pair[name]) for number, pair in enumerate(pairs)} for name in ("dear", "ddp"))
    return paired(*times)


def of_search(searched: Mapping[str, Curve]) -> str:
    """The settings of DDP that were tried, as a line of text."""
    return "a step: " + ", ".join(f"{name} {step_seconds(curve):.3f} s" for name, curve in searched.items())


def of_pair(pair: Mapping[str, Curve]) -> str:
    """One pair as a line of text."""
    times = {name: step_seconds(curve) for name, curve in pair.items()}
    shown = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in times.items())
    return f"a step: {shown}; dear / ddp {times['dear'] / times['ddp']:.2f}"


def report(pairs: Sequence[Mapping[str, Curve]], alone: Curve | None, other: str = "ddp") -> str:
    """The ratio of the pairs, and a table of losses: of the first pair, and of one process where it ran.

    `other`: the setting of DDP in the pairs.
    """
    curves = {**pairs[0], **({} if alone is None else {"one process": alone})}
    lines = [f"dear / {other}: {ratio(pairs).told}", ""]
    lines.append(f"{'step':>5}" + "".join(f"{name:>14}" for name in curves))
    losses = [curve["loss"] for curve in curves.values()]
    every = max(1, len(losses[0]) // SHOWN)
    for number, row in enumerate(zip(*losses, strict=True), 1):
        if number % every == 0:
            lines.append(f"{number:>5}" + "".join(f"{loss:>14.6f}" for loss in row))
    apart = max(max(row) - min(row) for row in zip(*losses, strict=True))
    lines.append(f"losses at the same step are at most {apart:.2g} apart, over {len(losses[0])} steps")
    return "\n".join(lines)
