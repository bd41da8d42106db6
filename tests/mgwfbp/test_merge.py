"""The merge rule: golden vectors of the published algorithm, and properties over random models."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest

from mgwfbp.merge import least_bytes, merge, predict
from overlap.plan.cost_model import CostModel

COST = CostModel(9.080981e-4, 7.395651e-10)  # 16 hosts, 10 Gbit/s, as the authors fitted it

# Sizes (elements of fp32) and backward times (ms) in forward order; groups in order of issue, numbered in forward order.
FEW = ([9408, 64, 36864, 64, 2359296, 512000], [3, 0.1, 2, 0.1, 1, 0.5])
MANY = (
    [9408, 64, 36864, 64, 36864, 64, 16384, 64, 2048000, 1000],
    [4, 1, 5, 1, 5, 1, 4, 1, 2, 0.1],
)
SMALL = {"merge_below": 4 * 8192}
GOLDEN: list[tuple[Any, dict[str, Any], list[list[int]], float | None]] = [
    (FEW, {}, [[5], [4, 3, 2, 1], [0]], 12.6329),
    (FEW, SMALL, [[5], [4, 3, 2, 1], [0]], 12.6329),
    (FEW, {"asc": True}, [[5], [4, 3], [2, 1, 0]], 11.8556),
    (MANY, {}, [[9], [8], [7, 6, 5], [4], [3], [2], [1], [0]], None),
    (MANY, SMALL, [[9, 8], [7, 6, 5], [4], [3, 2], [1, 0]], None),
    (MANY, {"asc": True}, [[9], [8], [7, 6, 5], [4], [3], [2], [1], [0]], None),
]


@pytest.mark.parametrize(("model", "options", "expected", "end_ms"), GOLDEN)
def test_golden_vectors(model: Any, options: dict[str, Any], expected: list[list[int]], end_ms: float | None) -> None:
    numels, times = model
    last = len(numels) - 1
    groups = merge([4 * n for n in reversed(numels)], [t / 1e3 for t in reversed(times)], COST, **options)
    assert [[last - index for index in group.tensors] for group in groups] == expected
    if end_ms is not None:
        assert groups[-1].end * 1e3 == pytest.approx(end_ms, abs=5e-5)


def _random_model(seed: int) -> tuple[list[int], list[float], CostModel]:
    choose = random.Random(seed)
    count = choose.randint(1, 60)
    nbytes = [4 * choose.choice([0, 1, 64, 5000, 300_000, 2_000_000]) for _ in range(count)]
    seconds = [choose.choice([0.0, 1e-5, 1e-3, 5e-3]) for _ in range(count)]
    return nbytes, seconds, CostModel(choose.choice([0.0, 1e-5, 1e-3]), choose.choice([0.0, 1e-10, 1e-8]))


@pytest.mark.parametrize("seed", range(60))
def test_groups_are_a_partition_and_times_are_consistent(seed: int) -> None:
    nbytes, seconds, cost = _random_model(seed)
    kinds = [random.Random(seed + index).choice("ab") for index in range(len(nbytes))]
    for options in ({}, {"asc": True}, {"merge_below": 32768}, {"kinds": kinds}):
        groups = merge(nbytes, seconds, cost, **options)  # type: ignore[arg-type]
        assert [index for group in groups for index in group.tensors] == list(range(len(nbytes)))
        assert groups[-1].end == pytest.approx(predict([g.tensors for g in groups], nbytes, seconds, cost))
        for before, after in pairwise(groups):
            assert after.start >= before.end
            assert after.start >= after.ready
        if "kinds" in options:
            assert all(len({kinds[index] for index in group.tensors}) == 1 for group in groups)


@pytest.mark.parametrize("seed", range(60))
def test_asc_never_ends_later_than_no_merging(seed: int) -> None:
    nbytes, seconds, cost = _random_model(seed)
    alone = predict([(index,) for index in range(len(nbytes))], nbytes, seconds, cost)
    assert merge(nbytes, seconds, cost, asc=True)[-1].end <= alone + 1e-12


def test_issuing_holds_up_backward() -> None:
    cost = CostModel(1.0, 0.0, handling=0.5)
    assert predict([(0,), (1,)], [8, 8], [10.0, 10.0], cost) == 22  # two issued, then one on the wire
    assert predict([(0, 1)], [8, 8], [10.0, 10.0], cost) == 21.5


def test_many_small_tensors_share_operations_although_the_link_has_time_for_each() -> None:
    nbytes, seconds = [4096] * 1000, [1e-3] * 1000
    alone, shared = CostModel(1e-4, 8e-9), CostModel(1e-4, 8e-9, handling=1e-4)
    assert len(merge(nbytes, seconds, shared)) == 1000  # the published rule: none is in another's way
    assert least_bytes(nbytes, seconds, alone) == 0
    assert least_bytes(nbytes, seconds, shared) == 2**18  # 16 starts, and 2 ms for the last group
    assert least_bytes([4 * 10**6] * 50, [1e-3] * 50, shared) == 0  # large ones: nothing to win
    assert least_bytes([], [], shared) == 0
    assert least_bytes(nbytes, seconds, shared, kinds=["a", "b"] * 500) == 0  # neighbours that cannot be merged


@pytest.mark.parametrize("seed", range(60))
def test_the_chosen_size_is_expected_to_end_no_later_than_none(seed: int) -> None:
    nbytes, seconds, cost = _random_model(seed)
    cost = CostModel(cost.alpha, cost.beta, handling=2e-5)

    def end(merge_below: int) -> float:
        groups = merge(nbytes, seconds, cost, merge_below=merge_below)
        return predict([group.tensors for group in groups], nbytes, seconds, cost)

    assert end(least_bytes(nbytes, seconds, cost)) <= min(end(0), end(2**30) + 1e-12)


def test_extremes() -> None:
    sizes, times = [1000] * 5, [1e-3] * 5
    assert len(merge(sizes, times, CostModel(0.0, 0.0))) == 5  # a free network: nothing to save
    assert len(merge(sizes, times, CostModel(1.0, 0.0))) == 1  # a start costs more than the whole backward
    assert merge([], [], COST) == ()


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="2 sizes, 1 times"):
        merge([1, 2], [1.0], COST)
    with pytest.raises(ValueError, match="2 sizes, 2 times, 1 kinds"):
        merge([1, 2], [1.0, 1.0], COST, kinds=["a"])
    with pytest.raises(ValueError, match=r"smallest is -1\.0"):
        merge([1], [-1.0], COST)
