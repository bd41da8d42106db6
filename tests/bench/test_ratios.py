"""Ratios of paired runs: their median, the interval by ranks, ties, and how they are told."""

from __future__ import annotations

import itertools
import random

import pytest

from bench.sweep.ratios import Ratio, interval, paired


@pytest.mark.parametrize(("count", "rank"), [(6, 1), (8, 1), (9, 2), (10, 2), (11, 2), (12, 3), (20, 6), (100, 40)])
def test_the_interval_is_between_ranks(count: int, rank: int) -> None:
    """The ranks are those of published tables for the median at 95 %."""
    values = [float(value) for value in range(1, count + 1)]
    random.Random(1).shuffle(values)
    assert interval(values) == (rank, count + 1 - rank)


@pytest.mark.parametrize("count", range(6))
def test_fewer_than_six_have_no_interval(count: int) -> None:
    assert interval([1.0] * count) is None


def test_the_interval_holds_the_median_as_often_as_it_says() -> None:
    """Counted over all ways in which eight values can lie below or above the median of all, 0."""
    lies = []
    for signs in itertools.product((-1, 1), repeat=8):
        found = interval([sign * (number + 1.0) for number, sign in enumerate(signs)])
        assert found is not None
        lies.append(found[0] <= 0 <= found[1])
    assert sum(lies) == 2**8 - 2


def test_runs_are_compared_with_those_of_the_same_number() -> None:
    found = paired({0: 1.0, 1: 2.0, 2: 9.0}, {1: 4.0, 0: 1.0})
    assert found == Ratio(0.75, 2)
    drifting = dict(enumerate([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]))  # both alike, on a machine that becomes slower
    same = paired(drifting, drifting)
    assert same == Ratio(1.0, 6, (1.0, 1.0))
    with pytest.raises(ValueError, match=r"runs \[0\] and \[1\] have no number in common"):
        paired({0: 1.0}, {1: 1.0})


@pytest.mark.parametrize(
    ("ratio", "cell", "told"),
    [
        (Ratio(0.811, 1), "0.81", "0.81 (n = 1)"),
        (Ratio(0.811, 6, (0.79, 0.836)), "0.81 (0.79 – 0.84)", "0.81 (0.79 – 0.84, n = 6)"),
        (Ratio(1.01, 6, (0.99, 1.02)), "1.01 (0.99 – 1.02), a tie", "1.01 (0.99 – 1.02, n = 6, a tie)"),
        (Ratio(1.0, 1), "1.00", "1.00 (n = 1)"),
        (Ratio(1.0, 6, (1.0, 1.0)), "1.00 (1.00 – 1.00), a tie", "1.00 (1.00 – 1.00, n = 6, a tie)"),
    ],
)
def test_a_ratio_is_told_with_n_and_its_interval(ratio: Ratio, cell: str, told: str) -> None:
    assert (ratio.cell, ratio.told) == (cell, told)
    assert ratio.tie == ("a tie" in told)
