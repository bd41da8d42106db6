"""The published search. Its authors' tables are not part of this project: those here are ours, and lead to their plans."""

from __future__ import annotations

import itertools

import pytest

from osdp.published import published_plan

# Of each strategy (nothing sharded, attention, the MLP, both), for a batch that is a row; what the published plans tell.
# Two entries follow from a plan of theirs that uses one strategy alone: 0.620066 s / 12 and 0.695595 s / 12.
HIDDEN_1536 = (
    [[9.0] * 4, [0.620066 / 12, 0.0574, (2.901937 - 2 * 0.0574) / 46, 0.0655], [0.0579, 0.695595 / 12, 0.07, 0.08]],
    [[1.0] * 4, [440.9, 248.6, 148.9, 120.2], [640.2, 590.8, 470.4, 430.4]],
)
HIDDEN_2048 = (
    [[9.0] * 4, [(2.221916 - 3 * 0.0961) / 21, 0.0961, 0.11, 0.13], [0.2] * 4],
    [[1.0] * 4, [690.3, 350.4, 330.1, 241.7], [9e3] * 4],
)


@pytest.mark.parametrize(
    ("tables", "layers", "limit", "counts", "seconds", "row"),
    [
        (HIDDEN_1536, 48, 8192, (0, 2, 46, 0), 2.901937, 1),
        (HIDDEN_1536, 12, 8192, (12, 0, 0, 0), 0.620066, 1),
        (HIDDEN_2048, 24, 16384, (21, 3, 0, 0), 2.221916, 1),
    ],
)
def test_the_published_plans(
    tables: tuple[list[list[float]], list[list[float]]],
    layers: int,
    limit: int,
    counts: tuple[int, ...],
    seconds: float,
    row: int,
) -> None:
    plan = published_plan(*tables, layers, limit)
    assert tuple(plan.strategies.count(strategy) for strategy in range(4)) == counts
    assert (plan.seconds, plan.row) == (pytest.approx(seconds, abs=1e-6), row)
    assert sum(int(tables[1][row][each]) for each in plan.strategies) <= limit - 800


def test_what_does_not_fit_says_by_how_much() -> None:
    with pytest.raises(ValueError, match=r"48 layers need 11568 MB at least, 4176 MB more than the rest"):
        published_plan(*HIDDEN_2048, 48, 8192)


@pytest.mark.parametrize("limit", range(803, 835))
def test_against_all_plans(limit: int) -> None:
    seconds, mb = [[], [3.0, 2.0, 1.1, 0.3]], [[], [1.9, 3.2, 4.0, 7.5]]
    found = published_plan(seconds, mb, 3, limit) if limit >= 803 else None
    fits = [p for p in itertools.product(range(4), repeat=3) if sum(int(mb[1][s]) for s in p) <= limit - 800]
    assert found is not None
    assert found.seconds == pytest.approx(min(sum(seconds[1][s] for s in plan) for plan in fits))


def test_the_first_batch_that_does_not_fit_ends_the_search() -> None:
    seconds = [[], [1.0], [0.5], [0.1]]
    assert published_plan(seconds, [[], [10], [500], [10]], 1, 1000).row == 1
    assert published_plan(seconds, [[], [10], [20], [500]], 1, 1000).row == 2, "the shortest batch, of those that fit"
