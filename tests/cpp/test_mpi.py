"""The engine's side of MPI, driven by hand: what needs an MPI that fails, or a look at what is kept."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

import comm_core
from comm_core import _C
from tests.cpp.build import compiler
from tests.harness import ROOT

LIBRARY = Path(_C.__file__).parent
PARTS = ("abandonment", "driver", "group", "mailbox", "requests", "session", "strand")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tests/cpp/mpi_test.cpp with the sources it is about, built against the library as it is installed."""
    if not comm_core.mpi_available():
        pytest.skip("the MPI backend was not built")
    path = tmp_path_factory.mktemp("cpp") / "mpi_test"
    csrc = ROOT / "comm_core" / "csrc"
    sources = [str(ROOT / "tests" / "cpp" / "mpi_test.cpp"), *(str(csrc / "mpi" / f"{part}.cpp") for part in PARTS)]
    include = [f"-I{ROOT / 'comm_core' / 'include'}", f"-I{csrc}"]
    link = [f"-L{LIBRARY}", "-lcomm_core", f"-Wl,-rpath,{LIBRARY}"]
    command = [comm_core.build_info()["mpi_compiler"], "-std=c++20", *include, *sources, *link, "-o", str(path)]
    subprocess.run(command, check=True, env={**os.environ, "OMPI_CXX": compiler(), "MPICH_CXX": compiler()})
    return path


@pytest.mark.parametrize("case", ["failed step", "failed split", "closed group"])
def test_case(program: Path, case: str) -> None:
    done = subprocess.run([str(program), case], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
