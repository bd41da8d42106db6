"""The two tiers together are all tests, and the fast one has what it promises."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest

from tests.tiers import ALONE, JOBS, Tier, is_beside, jobs_of

CASES = [
    [()],
    [(name,) for name in "abcdefgh"],
    list(product("abcdef", range(9))),
    list(product("abc", range(3), "xyz")),
]


@pytest.mark.parametrize("cases", CASES)
def test_every_case_runs_in_one_job_of_several_ranks(cases: Sequence[tuple[object, ...]]) -> None:
    for jobs in jobs_of("test_this", cases):
        assert len(jobs - {ALONE}) == 1
        assert jobs <= {*JOBS, ALONE}


@pytest.mark.parametrize("cases", CASES[2:])
def test_every_value_meets_every_job_of_several_ranks(cases: Sequence[tuple[object, ...]]) -> None:
    met = {
        (number, value, job)
        for case, jobs in zip(cases, jobs_of("test_this", cases), strict=True)
        for number, value in enumerate(case)
        for job in jobs
    }
    values = {(number, value) for case in cases for number, value in enumerate(case)}
    assert met >= {(*value, job) for value in values for job in JOBS}


def test_every_job_has_its_share() -> None:
    counts = {job: sum(job in jobs for jobs in jobs_of("test_this", CASES[2])) for job in JOBS}
    assert sum(counts.values()) == len(CASES[2])
    for job, count in counts.items():
        assert abs(count - len(CASES[2]) * JOBS[job] / sum(JOBS.values())) <= 4, counts


def test_tests_without_cases_are_spread() -> None:
    assert {job for number in range(20) for jobs in jobs_of(f"test_{number}", [()]) for job in jobs} == {*JOBS, ALONE}


def test_what_shows_at_two_ranks_only_runs_there() -> None:
    found = jobs_of("test_this", CASES[2], two_ranks=True)
    assert {frozenset(jobs - {ALONE}) for jobs in found} == {frozenset({"mpi-2"}), frozenset({"torchrun-2"})}
    assert {ALONE} < set.union(*found)


@pytest.mark.parametrize("fast", [True, False])
def test_the_tiers_are_disjoint_and_complete(fast: bool) -> None:
    assert Tier.ALL.takes(fast)
    assert Tier.FAST.takes(fast) is not Tier.REST.takes(fast)


def test_what_has_to_be_green_is_every_case_at_one_and_two_ranks_and_in_one_of_the_other_jobs() -> None:
    for number in range(4):
        assert is_beside(number, ALONE)
        assert is_beside(number, "mpi-2")
        assert [is_beside(number, job) for job in JOBS].count(True) == len(JOBS) - 1
    assert {job for job in JOBS if not is_beside(0, job)} != {job for job in JOBS if not is_beside(1, job)}
    assert Tier.BESIDE.takes(fast=False)
    assert not Tier.BESIDE.takes(fast=True)
