"""Which rank owns which parameter: greedy, as in OSS of FairScale (FairScale authors, 2021). Pure.

Sizes 6 4 2 4 1 over two ranks:   rank 0 | 6     4    = 10
                                  rank 1 |   4 2    1 =  7
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["assign_owners"]


def assign_owners(numels: Sequence[int], loads: Sequence[int]) -> tuple[int, ...]:
    """Give each parameter, in order, to the rank that owns the fewest elements so far, the lowest one of several.

    Rank r owns ``loads[r]`` elements before the first. Returns an owner for each of `numels`.
    """
    totals = list(loads)
    owners = []
    for numel in numels:
        owner = totals.index(min(totals))
        totals[owner] += numel
        owners.append(owner)
    return tuple(owners)
