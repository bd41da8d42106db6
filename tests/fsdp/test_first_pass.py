"""What ranks agree on when ``fully_shard()`` shards a model."""

from __future__ import annotations

import pytest

from fsdp.first_pass import _after_forward


def test_all_ranks_make_groups_for_backward_or_none_does() -> None:
    assert [_after_forward([[], [], []], rank) for rank in range(3)] == [None] * 3
    assert [_after_forward([[2], [2], [], [4]], rank) for rank in range(4)] == [2, 2, 1, 4]


def test_modules_of_a_model_have_groups_of_one_size() -> None:
    for rank in range(2):
        with pytest.raises(
            NotImplementedError, match="reshard_after_forward is 2 for some modules of a model and 4 for others"
        ):
            _after_forward([[2], [2, 4]], rank)
