"""Which lane a bucket takes."""

from __future__ import annotations

import pytest

from overlap.plan.partition import lane_of


@pytest.mark.parametrize(
    ("shares", "lane"),
    [
        ((5, 5), 0),
        ((5, 6), 1),
        ((6, 0), 0),
        ((1, 2, 3), 0),
        ((1, 0, 0, 2), 1),
        ((0, 4, 4, 0), 1),
        ((7,), 0),
    ],
)
def test_the_rank_with_the_largest_share_decides(shares: tuple[int, ...], lane: int) -> None:
    assert lane_of(shares, 2) == lane
    assert lane_of(shares, 1) == 0
