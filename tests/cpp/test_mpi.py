"""The engine's side of MPI, driven by hand: what needs an MPI that fails, or a look at what is kept."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import comm_core
from tests.cpp.build import program
from tests.harness import ROOT

PARTS = ("abandonment", "driver", "group", "mailbox", "requests", "session", "strand")


@pytest.fixture(scope="module")
def mpi_test(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tests/cpp/mpi_test.cpp with the sources it is about."""
    if not comm_core.mpi_available():
        pytest.skip("the MPI backend was not built")
    parts = (ROOT / "comm_core" / "csrc" / "mpi" / f"{part}.cpp" for part in PARTS)
    wrapper = comm_core.build_info()["mpi_compiler"]
    return program(tmp_path_factory.mktemp("cpp"), ROOT / "tests" / "cpp" / "mpi_test.cpp", *parts, using=wrapper)


@pytest.mark.parametrize("case", ["failed step", "failed split", "closed group"])
def test_case(mpi_test: Path, case: str) -> None:
    done = subprocess.run([str(mpi_test), case], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
