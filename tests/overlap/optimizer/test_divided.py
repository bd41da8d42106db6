"""Which ranks write what of a model that is divided."""

from __future__ import annotations

from typing import Any

import pytest

from overlap.optimizer.saving.divided import Holding, refuse_several, written_by
from overlap.state.boxes import Region, Segment

WHOLE = Region((4,), ((Segment(0, 0, 4),),))
HALVES = [Region((4,), ((Segment(0, 2 * half, 2),),)) for half in range(2)]


def _holding(ranks: tuple[int, ...], axes: Any = (), optimizers: int = 1, **regions: Any) -> Holding:
    return Holding(ranks, axes, regions, {}, optimizers, ())


def test_of_copies_the_first_optimizers_ranks_write() -> None:
    """data 2 × tensor 2."""
    holdings = [
        _holding((half, half + 2), whole=WHOLE, part=HALVES[half], buffer=None) for _ in range(2) for half in range(2)
    ]
    assert [written_by(holdings, rank) for rank in range(4)] == [
        {"whole", "part", "buffer"},
        {"part"},
        {"whole", "part"},
        {"part"},
    ]


def test_without_an_optimizer_one_rank_writes() -> None:
    holdings = [_holding((), whole=WHOLE, part=HALVES[rank // 2]) for rank in range(4)]
    assert [written_by(holdings, rank) for rank in range(4)] == [{"whole", "part"}, set(), {"part"}, set()]


def test_ranks_of_several_models_are_told() -> None:
    linked = [_holding((0, 2), ((0, 1),)), _holding((1, 3)), _holding((0, 2)), _holding((1, 3))]
    refuse_several(linked)
    with pytest.raises(ValueError, match=r"ranks \[0, 2\] and \[1, 3\] neither average"):
        refuse_several([_holding((rank % 2, rank % 2 + 2)) for rank in range(4)])
    refuse_several([_holding(()) for _ in range(2)])
    with pytest.raises(ValueError, match="rank 0 gives 1, and rank 1 2"):
        refuse_several([_holding((0, 1)), _holding((0, 1), optimizers=2)])
