"""OSDP's search as its authors published it (Jiang et al., IJCAI 2023): a knapsack over whole MB, for equal layers. Pure.

Here as a comparison, and for plans that are to be the same as theirs. Where it differs from :func:`osdp.search.best`:
memory is cut to whole MB, so that a plan may take up to a MB more for each layer than it says; and of several batch sizes
it takes the one with the shortest batch, not the one with the most samples a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy

__all__ = ["ROWS", "Published", "published_plan"]

_OVERHEAD = 800  # MB that are left for all else
#: The rows of the tables, by the size of a batch, that are searched.
ROWS = (1, 2, 3)


@dataclass(frozen=True, slots=True)
class Published:
    """The strategy of each layer, with `seconds` of a batch, the MB that the tables say, and the `row` of the tables."""

    strategies: tuple[int, ...]
    seconds: float
    mb: float
    row: int


def published_plan(
    seconds: Sequence[Sequence[float]], mb: Sequence[Sequence[float]], layers: int, limit_mb: int
) -> Published:
    """The plan of `layers` equal layers within `limit_mb`, of which 800 are left for all else.

    ``seconds[row][strategy]`` and ``mb[row][strategy]`` are of one layer; rows are batch sizes in ascending order. The
    first one that does not fit ends the search. Raises ``ValueError`` where none fits.
    """
    budget = limit_mb - _OVERHEAD
    found: list[Published] = []
    for row in ROWS:
        if row >= len(seconds):
            break
        strategies = _knapsack(seconds[row], [int(each) for each in mb[row]], layers, budget)
        if strategies is None:
            break
        total = sum(seconds[row][each] for each in strategies)
        found.append(Published(strategies, total, sum(mb[row][each] for each in strategies), row))
    if not found:
        least = layers * min(int(each) for each in mb[ROWS[0]])
        raise ValueError(
            f"the limit is {limit_mb} MB, of which {_OVERHEAD} are left for all else, and {layers} layers need {least} MB "
            f"at least, {least - budget} MB more than the rest"
        )
    return min(found, key=lambda plan: plan.seconds)


def _knapsack(seconds: Sequence[float], mb: Sequence[int], layers: int, budget: int) -> tuple[int, ...] | None:
    """The strategies of the shortest sum of `seconds` within `budget` MB; None where nothing fits."""
    if budget < 0:
        return None
    shortest = numpy.zeros(budget + 1)
    taken = []
    for _ in range(layers):
        ways = numpy.full((len(mb), budget + 1), numpy.inf)
        for strategy, size in enumerate(mb):
            if size <= budget:
                ways[strategy, size:] = shortest[: budget + 1 - size] + seconds[strategy]
        taken.append(ways.argmin(axis=0))
        shortest = ways.min(axis=0)
    if not numpy.isfinite(shortest[budget]):
        return None
    found, left = [], budget
    for choices in reversed(taken):
        found.append(int(choices[left]))
        left -= mb[found[-1]]
    return tuple(found[::-1])
