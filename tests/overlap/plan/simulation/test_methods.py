"""Predictions: the settings that methods choose by themselves, and what is said about a step."""

from __future__ import annotations

import pytest

from overlap.plan.simulation.events import Run
from overlap.plan.simulation.methods import (
    METHODS,
    PARTITIONS_MB,
    SIZES_MB,
    Guess,
    Prediction,
    predict,
    sizes_near,
)
from overlap.plan.simulation.network import Link, Network
from overlap.plan.simulation.schedules import by_priority, decoupled
from overlap.plan.simulation.workload import Costs, Layer, Workload, fused

MB = 2**20


def _work(layers: int) -> Workload:
    """64 MB in so many equal layers, which take 850 ms in all."""
    each = 0.85 / layers / 3
    return Workload(tuple(Layer(str(number), each, 2 * each, (64 * MB // layers,)) for number in range(layers)))


def _network(alpha: float = 0.0) -> Network:
    """Two ranks that all-reduce 64 MB in 800 ms, and starts."""
    return Network(2, Link(alpha, 0.8 / 64 / MB))


def test_dear_all_reduces_some_buckets_where_forward_is_too_short() -> None:
    work, network = _work(64), _network()
    sizes = {mb * by for mb in SIZES_MB for by in (0.5, 0.7, 1.0, 1.4, 2.0)}
    sharded = min(decoupled(work, network, fused(work.layers, mb * MB)).step for mb in sizes)
    assert METHODS["dear"](work, network).step < 0.97 * sharded


def test_bytescheduler_takes_the_partitions_that_are_fastest() -> None:
    work, network = _work(8), _network(alpha=5e-3)
    steps = [
        by_priority(work, network, partition=part * MB, credit=credit * MB, steps=4).step
        for part, credit in PARTITIONS_MB
    ]
    assert METHODS["bytescheduler"](work, network).step == min(steps) < steps[0]


def test_sizes_that_are_tried_are_neither_tiny_nor_huge() -> None:
    assert sizes_near(1.0) == [0.5, 0.7, 1.4, 2.0]
    assert sizes_near(0.3) == pytest.approx([0.42, 0.6])
    assert sizes_near(64.0) == [32.0, pytest.approx(44.8)]


@pytest.mark.parametrize(
    ("step", "waits", "cause"),
    [
        (2.0, {"all-gather 0": 0.2, "all-gather 11": 0.2, "reduce-scatter 0": 0.3}, "all-gathers"),
        (2.0, {"all-gather 0": 0.2, "reduce-scatter 0": 0.3}, "reduce-scatters"),
        (2.0, {"all-reduces": 0.3}, "all-reduces"),
        (2.0, {}, "the training thread"),
        (1.005, {"all-gather 0": 0.005}, "computation"),
    ],
)
def test_what_a_step_waits_for_most(step: float, waits: dict[str, float], cause: str) -> None:
    assert Prediction("dear", step, step, step, 1.0, 0.5, waits).cause == cause


def test_a_prediction_is_between_the_best_and_the_worst_of_the_guesses() -> None:
    def seconds(work: Workload, network: Network) -> Run:
        return Run(work.alone + network.all_reduce(work.nbytes).transfer)

    layers = (Layer("a", 1.0, 2.0, (1000,)),)
    likely, best, worst = (
        Guess(pace, Costs(), Link(0.0, byte), Link(0.0, 0.0)) for pace, byte in ((1.0, 4e-3), (0.5, 2e-3), (3.0, 8e-3))
    )
    found = predict("all", seconds, layers, 2, per_host=1, likely=likely, others=[worst, best])
    assert (found.step, found.best, found.worst) == pytest.approx((3.0 + 4.0, 1.5 + 2.0, 9.0 + 8.0))
    assert (found.alone, found.wire, found.bound) == pytest.approx((3.0, 4.0, 4.0))
    assert found.efficiency == pytest.approx(3 / 7)
