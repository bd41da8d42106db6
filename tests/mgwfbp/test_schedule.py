"""Times and buckets of MG-WFBP's plan, without a communicator."""

from __future__ import annotations

from dataclasses import replace

from mgwfbp.schedule import completed, durations, plan_buckets, reordered, table
from overlap.plan.cost_model import CostModel
from overlap.plan.partition import TensorSpec
from overlap.plan.plan import Facts

NOTHING: frozenset[int] = frozenset()
COST = CostModel(1.5e-3, 0.0)
SPECS = [TensorSpec(100, 4, "fp32")] * 4


def _facts(moments: tuple[float, ...] = (), idle: frozenset[int] = NOTHING) -> Facts:
    return Facts(((0,), (1,), (2,), (3,)), (3, 2, 1, 0), (1,) * 4, NOTHING, idle, moments=moments)


def test_durations_follow_the_order_and_never_go_back() -> None:
    assert durations([2, 0, 1], [3.0, 2.5, 1.0]) == [1.0, 2.0, 0.0]
    assert durations([1, 0], []) == [0.0, 0.0]


def test_buckets_follow_the_times() -> None:
    plan, groups = plan_buckets(_facts((0.013, 0.012, 0.001, 0.0)), SPECS, 2, COST)
    assert [bucket.spec.tensors for bucket in plan] == [(3, 2), (1, 0)]
    assert not any(bucket.sharded for bucket in plan)
    assert groups[-1].ready == 0.013


def test_given_times_come_before_observed_ones() -> None:
    plan, _ = plan_buckets(_facts((0.013, 0.012, 0.001, 0.0)), SPECS, 2, COST, seconds={3: 0.0, 2: 1.0, 1: 1.0, 0: 1.0})
    assert [bucket.spec.tensors for bucket in plan] == [(3,), (2,), (1,), (0,)]


def test_idle_and_foreign_tensors_stay_apart() -> None:
    specs = [*SPECS[:2], TensorSpec(100, 2, "bf16"), SPECS[3]]
    plan, groups = plan_buckets(_facts(idle=frozenset({1})), specs, 2, CostModel(1.0, 0.0))
    assert [bucket.spec.tensors for bucket in plan] == [(3,), (2,), (0,), (1,)]
    assert sum(len(group.tensors) for group in groups) == 3


def test_measured_moments_bring_their_own_order() -> None:
    facts = reordered(_facts((0.3, 0.2, 0.1, 0.0)), {0: 0.0, 1: 1.0, 3: 5.0})
    assert facts.arrivals == (0, 1, 3, 2)  # nobody saw 2: it stays behind 3
    assert facts.moments == (0.0, 1.0, 5.0, 5.0)


def test_the_table_says_what_is_sent_when() -> None:
    _, groups = plan_buckets(_facts((0.013, 0.012, 0.001, 0.0)), SPECS, 2, COST)
    lines = table(groups, COST).splitlines()
    assert "4 tensors in 2 buckets" in lines[0]
    assert "1.500 ms" in lines[0]
    assert len(lines) == 5
    assert lines[-1] == "the last gradient is ready 13.000 ms after backward began; reductions outlast it by 1.500 ms"


def test_what_travels_counts() -> None:
    """A reduction of 4 bytes an element outlasts the next gradient, one of 2 does not."""
    facts, cost = _facts((0.9, 0.6, 0.3, 0.0)), CostModel(0.1, 1e-3)
    for wire, expected in ((None, [(3,), (2, 1), (0,)]), (2, [(3,), (2,), (1,), (0,)])):
        specs = [TensorSpec(100, 4, "fp32", None, wire)] * 4
        plan, groups = plan_buckets(facts, specs, 2, cost)
        assert [bucket.spec.tensors for bucket in plan] == expected
        assert sum(group.nbytes for group in groups) == 400 * (wire or 4)


def test_backward_time_of_tensors_that_are_reduced_apart_counts() -> None:
    seconds = {0: 1.0, 1: 2.0, 2: 50.0, 3: 1.0}
    facts = _facts((0.003, 0.002, 0.001, 0.0))
    assert completed(seconds, facts) == (54.0, 53.0, 51.0, 1.0)
    apart = replace(facts, arrivals=(3, 1, 0))
    assert completed(seconds, apart) == (54.0, 53.0, 51.0, 1.0)
    _, groups = plan_buckets(apart, SPECS, 2, COST, seconds=seconds)
    assert [group.ready for group in groups] == [1.0, 53.0, 54.0]
