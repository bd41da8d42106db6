"""Groups of processes that a suite of one job has not: of five ranks, and of two worlds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import run_script


@pytest.mark.parametrize("ranks", [3, 5])
def test_random_collectives_where_ranks_are_no_power_of_two(ranks: int, tmp_path: Path) -> None:
    text = """
import comm_core
from tests.comm_core.random_groups import play
c = comm_core.mpi()
for seed in (10, 11):
    play(c, seed)
print("done", flush=True)
"""
    assert run_script(tmp_path, text, ranks).check().output.count("done") == ranks


def test_a_communicator_of_two_worlds_connects_and_splits(tmp_path: Path) -> None:
    """Neither world knows where the ranks of the other one are in their job."""
    text = """
import sys
import numpy as np
from mpi4py import MPI
import comm_core
parent = MPI.Comm.Get_parent()
here = parent == MPI.COMM_NULL
between = MPI.COMM_WORLD.Spawn(sys.executable, [__file__], maxprocs=2) if here else parent
both = between.Merge(high=not here)
c = comm_core.mpi(both)
assert (c.rank, c.size) == (both.rank, 4)
part = c.split(c.rank % 2, key=-c.rank)
data = np.full(100_000, c.rank, np.int32)
part.all_reduce(data, data)
assert (data == (4 if c.rank % 2 else 2)).all()
part.close()
c.close()
print("done", flush=True)
comm_core.finalize()
both.Free()
between.Disconnect()
"""
    assert run_script(tmp_path, text).check().output.count("done") == 4
