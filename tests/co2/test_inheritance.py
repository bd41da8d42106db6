"""What becomes of outer vectors of which shards are lost."""

from __future__ import annotations

import torch

from co2.recovery.inheritance import outer_vectors

VALUES = torch.arange(6.0).view(2, 3)


def test_lost_shards_begin_at_zero() -> None:
    shares = [(0, 2, {"momentum": torch.tensor([1.0, 2.0])}), (4, 6, {"momentum": torch.tensor([5.0, 6.0])})]
    vectors = outer_vectors(VALUES, shares, None)
    assert vectors["momentum"].tolist() == [[1, 2, 0], [0, 5, 6]]
    assert vectors["owed"].tolist() == vectors["pending"].tolist() == vectors["residual"].tolist() == [[0] * 3] * 2
    assert vectors["start"].equal(VALUES)
    assert vectors["next"].equal(VALUES)


def test_of_what_each_rank_has_the_mean_counts() -> None:
    shares = [(0, 6, {"momentum": torch.full((6,), value), "owed": torch.ones(6)}) for value in (1.0, 3.0)]
    vectors = outer_vectors(VALUES, shares, torch.ones(2, 3))
    assert vectors["momentum"].tolist() == [[2] * 3] * 2
    assert vectors["owed"].tolist() == [[1] * 3] * 2
    assert vectors["residual"].tolist() == [[1] * 3] * 2
