"""Chooses the learning rate of each method from one grid, by short runs of a seed that is not measured (pure).

A method's own options, such as an outer learning rate, stay what its name says; the inner optimizer's rate is searched.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["LAST", "SEED", "Search", "at_end", "best", "end_loss", "grid_of", "mean_of_end", "table", "told"]

SEED = 0  # measured ones begin with 1
LAST = 0.1  # of the steps: their mean loss is a rate's

# `steps`, and `tries`: for each rate of the grid the mean loss at its end, unless it diverged.
Search = Mapping[str, Any]


def mean_of_end(losses: Sequence[float]) -> float:
    """The mean of the last steps' losses; infinite where it is no number."""
    last = statistics.fmean(losses[-max(1, round(LAST * len(losses))) :])
    return last if math.isfinite(last) else math.inf


def end_loss(tried: Mapping[str, Any]) -> float:
    """The loss by which a run of the search is judged; infinite for one that diverged."""
    return float(tried.get("end_loss", math.inf))


def grid_of(search: Search) -> list[float]:
    return sorted(tried["rate"] for tried in search["tries"])


def best(search: Search) -> float:
    """The rate with the least loss at the end; of equal ones, the smaller. Raises ``ValueError`` where none has trained."""
    loss, rate = min((end_loss(tried), tried["rate"]) for tried in search["tries"])
    if math.isinf(loss):
        grid = ", ".join(f"{each:g}" for each in grid_of(search))
        raise ValueError(f"no learning rate of {grid} trains in {search['steps']} steps: give --rates smaller ones")
    return float(rate)


def at_end(search: Search) -> bool:
    """Whether the best rate is the smallest or the largest of the grid, beyond which a better one may lie."""
    grid = grid_of(search)
    return best(search) in (grid[0], grid[-1])


def _in_words(tried: Mapping[str, Any]) -> str:
    return f"{loss:.4f}" if math.isfinite(loss := end_loss(tried)) else "diverged"


def table(searches: Mapping[str, Search]) -> list[list[str]]:
    """A table: each method's loss at the end by the rates of the grid, and the rate that it takes."""
    grid = sorted({rate for search in searches.values() for rate in grid_of(search)})
    rows = [["method", *(f"{rate:g}" for rate in grid), "steps", "takes"]]
    for name, search in searches.items():
        tries = {tried["rate"]: tried for tried in search["tries"]}
        cells = [_in_words(tries[rate]) if rate in tries else "" for rate in grid]
        rows.append([name, *cells, f"{search['steps']:,}", f"{best(search):g}"])
    return rows


def told(searches: Mapping[str, Search]) -> str:
    """How rates were chosen, and for which methods the grid is too short, in words."""
    ends = [f"`{name}` ({best(search):g})" for name, search in searches.items() if at_end(search)]
    short = f" The grid is too short for {', '.join(ends)}: the best rate is at its end." if ends else ""
    return (
        "Each method has the learning rate, of one grid, with the least training loss at the end of a search: the mean "
        f"over ranks and over the last {LAST:.0%} of its steps, with a seed that is not measured.{short}"
    )
