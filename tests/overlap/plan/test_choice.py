"""Which setting is chosen, for jobs of which the answer is known."""

from __future__ import annotations

import time
from functools import partial

import pytest

from bytescheduler_adapter.optimizer import ByteScheduler
from dear.optimizer import Dear
from overlap.plan.choice import Job, choose, simulated
from overlap.plan.partition import TensorSpec, layout
from overlap.plan.plan import Facts, Plan, placed
from overlap.plan.simulation.events import Run
from overlap.plan.simulation.network import Fitted
from overlap.plan.simulation.workload import Bucket, Costs, Layer, Workload
from overlap.plan.strategy import PlannedStrategy

LAYERS, NUMEL = 96, 262144  # 1 MB each
AUTO = frozenset({"threshold_mb", "all_reduced"})


def job(compute: float, wire: float = 0.8, start: float = 5e-5, handling: float = 2e-4, numel: int = NUMEL) -> Job:
    """Equal layers on two ranks, a third of `compute` in forward."""
    each = compute / LAYERS / 3
    layers = tuple(Layer(str(number), each, 2 * each, (4 * numel,)) for number in range(LAYERS))
    pace = wire / 2 / (LAYERS * 4 * numel)
    specs = [TensorSpec(numel, 4)] * LAYERS
    places = {number: number for number in range(LAYERS)}
    return Job(Workload(layers, Costs(0.0, handling, 1e-10)), Fitted(2, start, pace, pace), specs, places)


def preview(strategy: PlannedStrategy, numel: int = NUMEL) -> Plan:
    order = tuple(range(LAYERS))
    facts = Facts(tuple((index,) for index in order), order[::-1], (1,) * LAYERS, frozenset(), frozenset())
    return strategy.plan(facts, [TensorSpec(numel, 4)] * LAYERS, [True] * LAYERS, 2)


def dear(threshold_mb: float = 3.0, all_reduced: float = 0.0, auto: frozenset[str] = AUTO) -> Dear:
    return Dear(threshold_mb, None, "", "rsag", False, None, all_reduced, auto)


@pytest.mark.parametrize("compute", [0.3, 0.6, 0.8, 1.0, 1.2, 2.4])
def test_the_chosen_setting_is_near_the_bound(compute: float) -> None:
    what = job(compute)
    choice = choose(dear(), preview, what)
    assert choice.seconds <= 1.003 * choice.before  # nearer to each other, the simpler one is taken
    assert choice.seconds < 1.06 * max(compute, 0.8)
    assert choice.seconds == pytest.approx(
        simulated(dear().at(choice.setting), preview(dear().at(choice.setting)), what).step
    )


def test_buckets_are_all_reduced_where_forward_is_too_short_and_backward_is_not() -> None:
    assert choose(dear(), preview, job(0.85)).setting["all_reduced"] > 0.2
    assert choose(dear(), preview, job(0.4)).setting["all_reduced"] == 0  # the wire is never idle
    assert choose(dear(), preview, job(2.4)).setting["all_reduced"] == 0  # forward is long enough
    kept = choose(dear(auto=frozenset({"threshold_mb"})), preview, job(0.85))
    assert kept.setting == {"threshold_mb": kept.setting["threshold_mb"]}


def test_a_start_that_costs_much_makes_larger_buckets() -> None:
    cheap, dear_one = (choose(dear(), preview, job(0.4, start=start)) for start in (1e-5, 2e-2))
    assert dear_one.setting["threshold_mb"] > 2 * cheap.setting["threshold_mb"]


def test_a_small_model_gets_small_buckets() -> None:
    """Of 6 MB on a slow network, a bucket of 1 MB is a sixth, which nothing hides at the ends."""
    small = 16384
    choice = choose(dear(1.0), partial(preview, numel=small), job(0.7, wire=0.56, numel=small))
    assert choice.setting["threshold_mb"] < 1
    assert choice.seconds < 0.95 * choice.before


def test_it_takes_no_longer_than_a_step() -> None:
    begun = time.process_time()
    choose(dear(), preview, job(0.8))
    assert time.process_time() - begun < 3.0


def test_a_plan_that_does_not_fit_is_not_chosen() -> None:
    choice = choose(dear(), preview, job(0.85), fits=lambda plan: all(bucket.sharded for bucket in plan))
    assert choice.setting["all_reduced"] == 0
    assert choice.tried > 1


def test_a_search_that_takes_too_long_ends_with_the_best_so_far() -> None:
    left = iter([False, False, *[True] * 100])
    choice = choose(dear(), preview, job(0.85), enough=lambda: next(left))
    assert 1 < choice.tried < 4
    assert choice.seconds <= choice.before


def test_what_no_planner_may_choose_stays() -> None:
    fixed = dear(auto=frozenset())
    choice = choose(fixed, preview, job(0.8))
    assert choice.setting == {}
    assert choice.tried == 1


def test_a_plan_that_is_in_force_may_stay_although_it_does_not_fit() -> None:
    choice = choose(dear(), preview, job(0.85), fits=lambda _plan: False)
    assert choice.setting == dear().planned
    assert choice.tried == 1


def test_settings_of_the_same_buckets_that_travel_otherwise_are_tried() -> None:
    """ByteScheduler's buckets are its layers; what is chosen is how they are cut."""
    first = ByteScheduler(0.5, 1.0, frozenset({"partition_mb", "credit_mb"}))
    choice = choose(first, preview, job(0.4, start=2e-3))
    assert choice.setting["partition_mb"] >= 1.0
    assert choice.seconds < 0.9 * choice.before


def test_buckets_are_simulated_nearest_the_input_first_with_the_bytes_of_each_rank() -> None:
    class Noting(Dear):
        def simulate(self, work: Workload, network: Fitted, buckets: object, whole: object) -> Run:  # type: ignore[override]
            seen.append((buckets, whole))
            return Run(1.0)

    seen: list[object] = []
    specs = [TensorSpec(numel, 2, None, owner) for numel, owner in ((320, 1), (32, 0), (64, 0), (32, 1), (1, 1))]
    plan = placed([layout(tensors, specs, 2) for tensors in ([4], [2, 3], [0, 1])], [False, False, True, True, True])
    what = Job(Workload(()), Fitted(2, 0.0, 0.0, 0.0), specs, {0: 1, 1: 1, 2: 2, 3: 3})  # 4 is in no layer
    simulated(Noting(1.0, None, "", "rsag", False, None), plan, what)
    assert seen == [([Bucket(1, 1, 704, 2, (64, 640)), Bucket(2, 3, 192, 2, (128, 64))], {0})]
