"""The suites that run inside every rank: at 1, 2 and 4 ranks over MPI, and at 2 ranks under torchrun.

At 4 ranks under torchrun, only the communicator's: rings pass segments on from three ranks up.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.harness import ROOT, run_ranks

JOBS = [
    pytest.param("spmd", "", "mpi", 4, id="spmd-mpi-4"),
    pytest.param("spmd", "", "torchrun", 2, id="spmd-torchrun-2"),
    *(pytest.param("spmd", "", "mpi", size, id=f"spmd-mpi-{size}") for size in (2, 1)),
    pytest.param("spmd", "test_communicator.py", "torchrun", 4, id="communicator-torchrun-4"),
    *(pytest.param("comm_core", "", "mpi", size, id=f"comm_core-mpi-{size}") for size in (4, 2, 1)),
]


@pytest.mark.timeout(1260)  # minutes, and several times that on a busy machine: single tests have their own limit
@pytest.mark.parametrize(("suite", "part", "launcher", "size"), JOBS)
def test_suite(suite: str, part: str, launcher: str, size: int, record_property: Callable[[str, object], None]) -> None:
    plugins = ["tests.spmd_plugin", "no:cacheprovider", "no:logging"]
    options = ["-q", "-x", *(word for name in plugins for word in ("-p", name)), "--timeout", "60", "--color", "no"]
    argv = ["-m", "pytest", *options, "--timeout-method", "thread", f"tests/{suite}/{part}"]
    result = run_ranks(size, argv, launcher, timeout=1200, env={"DEAR_SPMD_SUITE": suite}, cwd=ROOT).check()
    counts = re.findall(r"^(\d+ passed.*) in ", result.output, re.MULTILINE)
    assert counts, f"no rank reported how many tests passed:\n{result.output[-4000:]}"
    what = f"{suite} {part}".strip()
    record_property("suite", f"{what:<10} {launcher:<9} {size} rank(s): {counts[0]}, {result.seconds:.0f} s")
