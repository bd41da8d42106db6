"""Simulated schedules against what can be said about them with a pencil, and against each other."""

from __future__ import annotations

import pytest

from bench.simulation import Job, bytescheduler, dear, equal_buckets

LAYERS = 60


def job(ratio: float, **costs: float) -> Job:
    return Job(LAYERS, compute=1.0, wire=ratio, **costs)


@pytest.mark.parametrize(("size", "expected"), [(1, [1] * 7), (3, [3, 3, 1]), (9, [7])])
def test_buckets_hold_all_layers(size, expected):
    assert equal_buckets(7, size) == expected


@pytest.mark.parametrize("ratio", [0.33, 1.0, 2.0])
def test_nothing_is_faster_than_computation_and_wire(ratio):
    floor = max(1.0, ratio)
    for buckets in (equal_buckets(LAYERS, 1), equal_buckets(LAYERS, 6)):
        for eager in (False, True):
            assert dear(job(ratio), buckets, eager=eager) >= floor * (1 - 1e-9)
    assert bytescheduler(job(ratio), partitions=1, credit=2) >= floor * (1 - 1e-9)


def test_one_bucket_hides_nothing():
    # Its reduction starts when backward has ended, and forward when it is gathered.
    assert dear(job(1.0), [LAYERS]) == pytest.approx(2.0)


@pytest.mark.parametrize("ratio", [0.5, 1.0, 4 / 3, 2.0])
def test_plain_dear_comes_near_its_two_phases(ratio):
    # Forward against all-gathers and backward against reduce-scatters, besides a bucket at each end.
    bound = max(1 / 3, ratio / 2) + max(2 / 3, ratio / 2)
    found = dear(job(ratio), equal_buckets(LAYERS, 1))
    assert bound * (1 - 1e-9) <= found <= bound + 2.5 * ratio / LAYERS


def test_early_updates_help_most_where_computation_and_wire_are_equal():
    buckets = equal_buckets(LAYERS, 1)
    assert dear(job(1.02), buckets, eager=True) < 1.04 * 1.02
    assert dear(job(1.02), buckets) > 1.15 * 1.02


def test_the_threads_costs_count_as_computation():
    costs = {"per_layer": 1e-3, "per_bucket": 1e-3}
    assert dear(job(0.1, **costs), equal_buckets(LAYERS, 1)) >= 1 + 2 * LAYERS * 1e-3


def test_more_credit_delays_the_layer_that_is_needed_first():
    periods = [bytescheduler(job(1.0), partitions=1, credit=credit) for credit in (1, 2, 4, 8)]
    assert periods == sorted(periods)
    assert periods[-1] - periods[1] > 5 / LAYERS  # six more layers under way, each a layer's time on the wire
