"""The engine's side of MPI, driven by hand: what needs an MPI that fails, or a look at what is kept."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

import comm_core
from tests.cpp.build import compile_to, program
from tests.harness import ROOT, run_ranks

SOURCES = ROOT / "comm_core" / "csrc" / "mpi"
ELSEWHERE = ("module", "runtime")  # what belongs to the extension module alone


@pytest.fixture(scope="module")
def mpi_test(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tests/cpp/mpi_test.cpp with the sources it is about."""
    if not comm_core.mpi_available():
        pytest.skip("the MPI backend was not built")
    parts = [part for part in sorted(SOURCES.rglob("*.cpp")) if part.stem not in ELSEWHERE]
    wrapper = comm_core.build_info()["mpi_compiler"]
    return program(tmp_path_factory.mktemp("cpp"), ROOT / "tests" / "cpp" / "mpi_test.cpp", *parts, using=wrapper)


CASES = [
    "failed step",
    "failed split",
    "closed group",
    "no turn",
    "failed group",
    "letters",
    "late ranks",
    "after the end",
    "far ahead",
    "two worlds",
]


@pytest.mark.parametrize("case", CASES)
def test_case(mpi_test: Path, case: str) -> None:
    done = subprocess.run([str(mpi_test), case], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_blocks_the_engine_is_called_in_one_file() -> None:
    """That file asks for the turn. What begins and ends MPI blocks too, before and after everything else.

    MPI_Comm_free may, by the standard, and does not in Open MPI and MPICH: called where all ranks have come, or where one
    could not be made.
    """
    makes = r"Comm_(?:dup|split|create(?!_keyval)|spawn|accept|connect|disconnect|join|free(?!_keyval))|Intercomm|Cart"
    messages = r"(?:[BR]?s|S|Ss)end|M?[Rr]ecv|M?[Pp]robe|Buffer_detach"
    collectives = r"Barrier|Bcast|All|Reduce|Gather|Scatter|Scan|Exscan|Neighbor|Win|File"
    calls = rf"\bMPI_(?:{makes}|{messages}|{collectives}|Wait)\w*\("
    named = {path.name: re.findall(calls, path.read_text()) for path in SOURCES.rglob("*.cpp")}
    assert {name: found for name, found in named.items() if found} == {
        "blocking.cpp": ["MPI_Comm_dup(", "MPI_Comm_split(", "MPI_Barrier(", "MPI_Barrier(", "MPI_Allreduce("],
        "group.cpp": ["MPI_Comm_free("] * 2,
        "retired.cpp": ["MPI_Comm_free("] * 2,
    }


@pytest.fixture(scope="module")
def mpi_error(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tests/cpp/mpi_error.cpp as a library, which stands before MPI."""
    if not comm_core.mpi_available():
        pytest.skip("the MPI backend was not built")
    library = tmp_path_factory.mktemp("mpi") / "libmpi_error.so"
    source = ROOT / "tests" / "cpp" / "mpi_error.cpp"
    compile_to(library, [comm_core.build_info()["mpi_compiler"], "-std=c++20", "-shared", "-fPIC", str(source)])
    return library


@pytest.mark.parametrize("after", [1, 50])
def test_an_mpi_error_on_one_rank_leaves_no_rank_waiting(after: int, mpi_error: Path, tmp_path: Path) -> None:
    text = """
import numpy as np
import comm_core
c = comm_core.mpi()
data = np.ones(100_000, np.float32)
for _ in range(200):
    c.all_reduce(data, data, comm_core.ReduceOp.MAX)
    c.broadcast(data)
"""
    preload = ":".join(filter(None, [os.environ.get("LD_PRELOAD"), str(mpi_error)]))
    environ = {"LD_PRELOAD": preload, "FAILING_RANK": "1", "FAILING_AFTER": str(after)}
    result = run_ranks(3, ["-c", text], timeout=400, env=environ, cwd=tmp_path, real_start=True)
    assert not result.timed_out, result.output
    assert result.returncode != 0
    assert "comm_core.MpiError: " in result.output
    assert "rank 1 receiving from rank 0" in result.output


def test_a_split_that_fails_does_not_keep_the_turn(mpi_error: Path, tmp_path: Path) -> None:
    """Rank 0 has the turn while rank 1 fails, and cannot take back what it has sent to it."""
    text = """
import threading, time
import comm_core
c = comm_core.mpi()
part = c.split(0)
def split():
    try:
        part.split(0)
    except comm_core.TransportError:
        print("failed", flush=True)
splitting = threading.Thread(target=split)
splitting.start()
if c.rank == 1:
    splitting.join()
c.barrier()
if c.rank == 0:
    time.sleep(0.1)
    giving_up = threading.Thread(target=part.abandon)
    giving_up.start()
    splitting.join()
c.split(0).barrier()
if c.rank == 0:
    giving_up.join()
else:
    part.abandon()
print("went on", flush=True)
"""
    # A receive for letters, and three of a split, twice; the last is that of the second split, when all have the turn.
    environ = {"FAILING_RANK": "1", "FAILING_AFTER": "7", "FAILING_TIMES": "1"}
    preload = ":".join(filter(None, [os.environ.get("LD_PRELOAD"), str(mpi_error)]))
    environ |= {"LD_PRELOAD": preload}
    result = run_ranks(2, ["-c", text], timeout=30, env=environ, cwd=tmp_path, real_start=True).check()
    assert [result.output.count(line) for line in ("failed", "went on")] == [2, 2]
