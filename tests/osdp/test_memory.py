"""The memory of real ranks under a limit, as Linux counts it: never above, nearly all of it used, as it was predicted."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest

from osdp.memory_plan import MARGIN
from tests.harness import run_ranks


def _job(limit_gb: float) -> dict[str, Any]:
    done = run_ranks(2, ["-m", "tests.osdp.memory_job", f"{limit_gb:.6f}"], "mpi").check()
    found: dict[str, Any] = json.loads(done.output.strip().splitlines()[-1])
    return found


@functools.cache
def _without_limit() -> dict[str, Any]:
    return _job(64.0)


def _most(found: dict[str, Any]) -> int:
    """The bytes that a rank took at most once the plan was in force, also where the other one came late."""
    settled = [[took for done, took in steps if done] for steps in found["steps"]]
    assert len(settled[0]) >= 6
    return max(map(max, settled))


@pytest.mark.slow  # four jobs, whose steps wait for a rank that is late
@pytest.mark.parametrize("share", [0.0, 1 / 3, 2 / 3])
def test_a_limit_is_kept_and_used(share: float) -> None:
    free = _without_limit()
    limit = (free["freed"] + share * free["more"]) / (1 - MARGIN) + free["more"] / 24  # a bucket: jobs are not alike
    found = _job(limit / 2**30)
    print(f"{_most(found) / limit:.4f} of the limit, {found['predicted'] / limit:.4f} predicted, {found['kept']} kept")
    assert found["kept"] < free["kept"] == 24
    assert 0.97 * limit <= _most(found) <= limit
    assert found["predicted"] == pytest.approx(_most(found), rel=0.02)


@pytest.mark.slow
def test_without_need_to_free_anything_memory_is_predicted() -> None:
    free = _without_limit()
    print(f"{_most(free) / free['predicted']:.4f} of what was predicted")
    assert free["predicted"] == pytest.approx(_most(free), rel=0.02)
