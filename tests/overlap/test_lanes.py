"""Which lane a bucket takes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from overlap.core.lanes import Lanes


@pytest.mark.parametrize(
    ("shares", "lane"),
    [
        ((5, 5), "a"),
        ((5, 6), "b"),
        ((6, 0), "a"),
        ((1, 2, 3), "a"),
        ((1, 0, 0, 2), "b"),
        ((0, 4, 4, 0), "b"),
        ((7,), "a"),
    ],
)
def test_the_rank_with_the_largest_share_decides(shares: tuple[int, ...], lane: str) -> None:
    two: Any = Lanes(["a", "b"])  # type: ignore[list-item]
    bucket: Any = SimpleNamespace(shares=shares)
    assert two.of(bucket) == lane
    assert Lanes(["a"]).of(bucket) == "a"  # type: ignore[list-item,comparison-overlap]
    assert two.first == "a"
