"""Groups of processes that a suite of one job has not: of five ranks, and of two worlds; and what a group leaves behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.comm_core_processes.test_thread import NEXT_NUMBER
from tests.harness import run_script


@pytest.mark.full
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
    assert run_script(tmp_path, text, ranks, real_start=True).check().output.count("done") == ranks


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
    assert run_script(tmp_path, text, real_start=True).check().output.count("done") == 4


@pytest.mark.full
def test_a_rank_that_ends_late_is_waited_for(tmp_path: Path) -> None:
    """Longer than what nobody answers: it is no error."""
    text = """
import time
import comm_core
c = comm_core.mpi()
part = c.split(0)
if c.rank == 1:
    time.sleep(2.5)
print("ends", flush=True)
"""
    result = run_script(tmp_path, text, real_start=True, COMM_CORE_EXIT_SECONDS="1").check()
    assert result.output.count("ends") == 2
    assert "rror" not in result.output, result.output


NUMBERS = "import numpy as np" + NEXT_NUMBER + "part = c.split(0)\n"
LEFT_BEHIND = {
    "a letter": """
if c.rank == 1:
    part.close()
c.barrier()
if c.rank == 0:
    part.post(1, b"too late")
    part.close()
""",
    "an operation": """
try:
    part.all_reduce(np.ones(4, "i4" if c.rank else "f4"), np.ones(4, "i4" if c.rank else "f4"))
except comm_core.TransportError:
    part.abandon()
    part.close()
""",
    "nothing": """
part.all_reduce(np.ones(4), np.ones(4))
part.post(1 - c.rank, b"in time")
assert part.receive_post(10) == (1 - c.rank, b"in time")
part.close()
""",
}


@pytest.mark.parametrize("what", LEFT_BEHIND)
def test_a_number_is_given_away_when_nothing_is_on_its_way(what: str, tmp_path: Path) -> None:
    """The next communicator with that number would receive it. MPI gives the lowest number that is free."""
    again = f"comes_again(before, tries={50 if what == 'nothing' else 1})"
    text = f"{NUMBERS}{LEFT_BEHIND[what]}print('again' if {again} else 'another', flush=True)\n"
    output = run_script(tmp_path, text, real_start=True).check().output
    assert output.count("again" if what == "nothing" else "another") == 2, output
    assert "rror" not in output, output
