"""The two tiers together are all tests, and the fast one has what it promises."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.tiers import (
    FOUR,
    OF_THE_BACKEND,
    OVER_MPI,
    OVER_TCP,
    TWO,
    Tier,
    is_beside,
    is_known,
    jobs_of,
    strategies_of,
)

PROMISES = [f"test_this[{number}]" for number in range(400)]
STRATEGIES = ("dear", "dear-layerwise", "oss", "wfbp", "mgwfbp", "bytescheduler")


@pytest.mark.parametrize("promise", PROMISES[:20])
def test_a_promise_is_shown_in_shards_in_full_and_once_more(promise: str) -> None:
    shown = strategies_of(promise, STRATEGIES)
    assert len(shown) == 3
    assert "dear" in shown
    assert shown & {"wfbp", "mgwfbp", "bytescheduler"}


@pytest.mark.parametrize("promise", PROMISES[:20])
def test_a_promise_may_be_shown_in_shards_and_in_full_alone(promise: str) -> None:
    shown = strategies_of(promise, STRATEGIES, third=False)
    assert "dear" in shown
    assert len(shown & {"wfbp", "mgwfbp", "bytescheduler"}) == 1
    assert len(shown) == 2


def test_every_strategy_has_its_turn() -> None:
    assert set.union(*(strategies_of(promise, STRATEGIES) for promise in PROMISES)) == set(STRATEGIES)


@pytest.mark.parametrize("names", [("",), ("oss",), ("wfbp", "mgwfbp"), ("diloco", "eager")])
def test_two_names_are_both_shown(names: tuple[str, ...]) -> None:
    assert strategies_of("test_this", names) == set(names)


@pytest.mark.parametrize("possible", [TWO, FOUR, OVER_MPI, OVER_TCP])
def test_a_promise_is_shown_in_one_job_and_some_also_alone(possible: tuple[str, ...]) -> None:
    found = [jobs_of(promise, possible) for promise in PROMISES]
    assert all(len(jobs - {"mpi-1"}) == 1 for jobs in found)
    counts = Counter(job for jobs in found for job in jobs)
    assert set(counts) == {*possible, "mpi-1"}
    assert counts["mpi-1"] == pytest.approx(len(PROMISES) / 8, rel=0.3)
    for job in possible:
        assert counts[job] == pytest.approx(len(PROMISES) * possible.count(job) / len(possible), rel=0.3)


@pytest.mark.parametrize("takes_four", [True, False])
def test_the_backend_is_shown_at_two_ranks_or_at_four(takes_four: bool) -> None:
    found = {job for promise in PROMISES for job in jobs_of(promise, OF_THE_BACKEND[takes_four])}
    assert found - {"mpi-1"} == {"torchrun-4" if takes_four else "torchrun-2"}


def test_a_job_of_another_size_runs_everything() -> None:
    assert all(is_known(job) for job in (*TWO, *FOUR, *OVER_MPI, *OVER_TCP, "mpi-1", "torchrun-4"))
    assert not is_known("mpi-3")


@pytest.mark.parametrize("fast", [True, False])
def test_the_tiers_are_disjoint_and_complete(fast: bool) -> None:
    assert Tier.ALL.takes(fast)
    assert Tier.FAST.takes(fast) is not Tier.REST.takes(fast)


def test_what_has_to_be_green_is_every_case_in_one_of_the_jobs() -> None:
    jobs = ("mpi-1", "mpi-2", "mpi-4", "torchrun-2")
    for promise in PROMISES:
        assert [is_beside(promise, job) for job in jobs].count(True) == 1
    assert all(any(is_beside(promise, job) for promise in PROMISES) for job in jobs)
    assert Tier.BESIDE.takes(fast=False)
    assert not Tier.BESIDE.takes(fast=True)
