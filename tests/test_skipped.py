"""What the end of a run tells of tests that did not run."""

from __future__ import annotations

from tests.skipped import reasons, table

OUTPUT = """\
.s.s [100%]
=========== short test summary info ===========
SKIPPED [2] tests/spmd/test_start.py:103: one rank sends nothing
SKIPPED [1] tests/spmd/test_start.py:113: one rank sends nothing
SKIPPED [12] tests/conftest.py:38: slow; make test-slow runs it
7 passed, 15 skipped in 1.00s
"""


def test_reasons_are_those_of_the_short_summary() -> None:
    assert reasons(OUTPUT) == {"one rank sends nothing": 3, "slow; make test-slow runs it": 12}


def test_what_every_job_skips_did_not_run() -> None:
    jobs = {
        "spmd mpi 1": reasons(OUTPUT),
        "spmd mpi 2": {"slow; make test-slow runs it": 10},
        "comm_core mpi 1": {},
    }
    assert table({"needs Horovod": 1}, jobs) == [
        "not run at all:",
        "    1 needs Horovod",
        "   12 slow; make test-slow runs it (every job of spmd)",
        "run in other jobs:",
        "    3 one rank sends nothing (spmd mpi 1)",
    ]
    assert table({}, {}) == []
