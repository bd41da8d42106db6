"""Models that need three times the memory of a rank."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.overlap.optimizer.limited_job import LIMIT, parent


def _job(strategy: str) -> subprocess.CompletedProcess[str]:
    job = ["bash", "scripts/mpirun", "-np", "4", sys.executable, "-m", "tests.overlap.optimizer.limited_job", strategy]
    environ = os.environ | {"DEAR_POISON": "0"}  # which keeps what is freed, as NaN
    environ.pop("DEAR_TESTS_FORKSERVER", None)  # whose children would copy pages of what they have imported
    done = subprocess.run(job, capture_output=True, text=True, timeout=300, env=environ)
    folder = parent()
    for left in (
        () if folder is None or done.returncode == 0 else folder.glob("dear-test-*")
    ):  # of ranks that were killed
        left.rmdir()
    return done


@pytest.mark.full
@pytest.mark.needs_root
@pytest.mark.skipif(parent() is None, reason="no control groups to limit memory by")
@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("fully_shard", marks=pytest.mark.slow)])
def test_four_ranks_train_what_needs_three_times_the_memory_of_one(strategy: str) -> None:
    done = _job(strategy)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trained to") == 4
    assert done.stdout.count(f"MB of {LIMIT / 2**20:.0f}") == 4


@pytest.mark.needs_root
@pytest.mark.skipif(parent() is None, reason="no control groups to limit memory by")
def test_whole_parameters_that_do_not_fit_are_refused_before_the_first_step() -> None:
    done = _job("dear")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("MemoryError: strategy 'dear' keeps whole parameters and gradients on every rank") == 4
    assert "with strategy='fsdp' each rank keeps 1/4 of them" in done.stdout
