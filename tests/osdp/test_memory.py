"""The memory of real ranks under a limit, as Linux counts it: never above, nearly all of it used, as it was predicted."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest

from tests.harness import run_ranks


def _job(limit_gb: float) -> dict[str, Any]:
    done = run_ranks(2, ["-m", "tests.osdp.memory_job", f"{limit_gb:.6f}"], "mpi").check()
    found: dict[str, Any] = json.loads(done.output.strip().splitlines()[-1])
    return found


@functools.cache
def _without_limit() -> dict[str, Any]:
    return _job(64.0)


@pytest.mark.slow  # on a machine that is busy, gradients wait for other ranks, in memory
@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_a_limit_is_kept_and_used(share: float) -> None:
    free = _without_limit()
    assert free["kept"] > 20
    limit = free["freed"] + share * free["more"]
    found = _job(limit / 2**30)
    assert 0 < found["kept"] < free["kept"]
    settled = [[took for done, took in steps if done] for steps in found["steps"]]
    assert len(settled[0]) > 5
    most = max(map(max, settled))
    assert most <= limit
    assert most >= 0.97 * limit
    assert found["predicted"] == pytest.approx(most, rel=0.02)
