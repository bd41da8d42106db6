"""Whether ranks are in one default group: their numbers alone do not tell."""

from __future__ import annotations

from overlap.job.default_ranks import Place, why_apart


def test_ranks_of_one_group_may_have_other_numbers_in_it() -> None:
    assert why_apart([Place("a", 3, 4), Place("a", 1, 4)]) is None


def test_ranks_of_different_groups_are_apart_whatever_their_numbers() -> None:
    assert why_apart([Place("a", 0, 2), Place("b", 1, 2)]) == (
        "ranks 0 and 1 of 2 are in different ones (rank 0 of 2, and rank 1 of 2)"
    )


def test_a_rank_without_a_group_is_named() -> None:
    assert why_apart([Place("a", 0, 1), None]) == "rank 1 of 2 has none"
    assert why_apart([None, Place("a", 0, 1)]) == "rank 0 of 2 has none"
