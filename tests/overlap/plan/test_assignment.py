"""Who owns which parameter, by hand."""

from __future__ import annotations

import random

import pytest

from overlap.plan.assignment import assign_owners


@pytest.mark.parametrize(
    ("numels", "loads", "expected"),
    [
        ((6, 4, 2, 4, 1), (0, 0), (0, 1, 1, 0, 1)),  # 6 | 4 | 4+2 | a tie: 6+4 | 6+1
        ((5, 5, 5, 5), (0, 0, 0), (0, 1, 2, 0)),
        ((100, 1, 1, 1), (0, 0), (0, 1, 1, 1)),  # whatever its size, a parameter stays whole
        ((3, 2), (0, 0, 0, 0), (0, 1)),  # ranks 2 and 3 own nothing
        ((0, 0, 4, 0), (0, 0), (0, 0, 0, 1)),
        ((2, 2, 2), (7, 4, 5), (1, 2, 1)),  # totals go on where earlier groups left them: 4+2, 5+2, a tie 6+2
        ((1, 2, 3), (9,), (0, 0, 0)),
        ((), (0, 0), ()),
    ],
)
def test_the_rank_with_the_fewest_elements_is_next(
    numels: tuple[int, ...], loads: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert assign_owners(numels, loads) == expected


@pytest.mark.parametrize("seed", range(20))
def test_groups_one_by_one_give_what_they_give_together_and_nobody_lags_far(seed: int) -> None:
    choose = random.Random(seed)
    numels = [choose.randint(0, 1000) for _ in range(choose.randint(1, 60))]
    size, cut = choose.randint(1, 9), choose.randint(0, len(numels))
    together = assign_owners(numels, (0,) * size)
    first = assign_owners(numels[:cut], (0,) * size)
    loads = [sum(n for n, owner in zip(numels, first, strict=False) if owner == rank) for rank in range(size)]
    assert (*first, *assign_owners(numels[cut:], loads)) == together
    totals = [sum(n for n, owner in zip(numels, together, strict=True) if owner == rank) for rank in range(size)]
    assert max(totals) - min(totals) <= max(numels)
