"""What becomes of outer vectors of which shards are lost."""

from __future__ import annotations

from typing import Any

import torch

from co2.recovery.inheritance import left_by, outer_vectors

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


class _Rounds:
    """Of which `name` is left."""

    rule = None

    def __init__(self, name: str, *, begun: bool = True, retired: bool = False) -> None:
        self.name, self.retired = name, retired
        self.parts: list[Any] = [_Part()] if begun else []

    def left(self) -> dict[str, Any]:
        return {"name": self.name}


class _Part:
    def own_vectors(self) -> dict[int, dict[str, torch.Tensor]]:
        return {}

    def lasting(self) -> dict[int, Any]:
        return {}


def test_what_is_left_is_of_optimizers_that_train() -> None:
    before: Any = [{"name": "before"}]
    lost, first, second = _Rounds("lost", retired=True), _Rounds("first", begun=False), _Rounds("second")
    found: list[Any] = [left_by(several, before) for several in ([lost, first, second], [lost, first], [])]  # type: ignore[arg-type]
    assert [[left["name"] for left in each] for each in found] == [["first", "second"], ["before"], ["before"]]
