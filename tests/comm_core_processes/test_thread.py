"""What comm_core's own thread inherits from its process, hears of, and lets go."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import run_ranks, run_script

#: MPI gives the next communicator the lowest number that is free, so `next_number()` tells whether all were given back.
#: Engines do that in their own time, long on a busy machine: `comes_again()` asks until it comes on all ranks.
NEXT_NUMBER = """
import time
from mpi4py import MPI
import comm_core
c = comm_core.mpi()
def next_number():
    c.barrier()
    time.sleep(0.1)
    made = MPI.COMM_WORLD.Dup()
    number = made.py2f()
    made.Free()
    return number
def comes_again(number, tries=50):
    return any(all(MPI.COMM_WORLD.allgather(next_number() == number)) for _ in range(tries))
before = next_number()
"""


@pytest.mark.full
def test_sums_are_the_same_where_one_rank_flushes_subnormal_numbers(tmp_path: Path) -> None:
    """The thread that sums would inherit that from the one that starts it."""
    text = """
import numpy as np, torch
import comm_core
import os
torch.set_flush_denormal(os.environ["OMPI_COMM_WORLD_RANK"] == "1")
c = comm_core.mpi()
for count in (13, 300_000):
    bits = np.full(count, 70_000, np.int32)
    c.all_reduce(bits.view(np.float32), bits.view(np.float32))
    assert (bits == 140_000).all(), bits
"""
    run_script(tmp_path, text, real_start=True).check()


def test_the_engine_hears_of_crashes_and_of_no_other_signal(tmp_path: Path) -> None:
    """Neither do the threads that MPI starts there block what faulthandler and MPI's own backtrace wait for."""
    text = """
import signal
from pathlib import Path
import comm_core
c = comm_core.mpi()
crashes = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP}
def blocked(task):
    mask = int((task / "status").read_text().split("SigBlk:")[1].split()[0], 16)
    return {number for number in signal.Signals if mask >> (number - 1) & 1}
tasks = {task: (task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()}
assert not any(blocked(task) & crashes for task in tasks), {name: blocked(task) for task, name in tasks.items()}
engine = [task for task, name in tasks.items() if name == "comm_core"]  # and what MPI has started there
others = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD}
assert engine and all(others <= blocked(task) for task in engine)
"""
    run_script(tmp_path, text, real_start=True).check()


def test_a_crash_of_the_engine_is_reported(tmp_path: Path) -> None:
    text = """
import faulthandler
import numpy as np
import comm_core
c = comm_core.mpi()
faulthandler.enable()
c.all_reduce(comm_core.Buffer(64, 1, comm_core.DType.FLOAT32), np.zeros(1, np.float32))
"""
    result = run_ranks(1, ["-c", text], "single", cwd=tmp_path, real_start=True)
    assert "Fatal Python error: Segmentation fault" in result.output


def test_communicators_that_are_dropped_are_given_back(tmp_path: Path) -> None:
    """Also those of a split that Ctrl-C has left."""
    text = (
        """
import signal, threading
"""
        + NEXT_NUMBER
        + """for _ in range(20):
    c.split(0).barrier_async()
    c.split(c.rank)
    comm_core.mpi().all_gather_counts(1)
assert comes_again(before), "dropped"
kept = [c.split(0) for _ in range(3)]
kept[c.rank].close()
del kept[c.rank]
while_some_are_kept = next_number()
if c.rank == 0:
    threading.Timer(0.2, lambda: signal.raise_signal(signal.SIGINT)).start()
    try:
        c.split(0)
    except KeyboardInterrupt:
        print("left", flush=True)
    MPI.COMM_WORLD.send("left", 1)
else:
    MPI.COMM_WORLD.recv(source=0)
    c.split(0)
assert comes_again(while_some_are_kept), "left"
kept.clear()
assert comes_again(before), "closed here, dropped there"
"""
    )
    result = run_script(tmp_path, text, real_start=True).check()
    assert "left" in result.output
