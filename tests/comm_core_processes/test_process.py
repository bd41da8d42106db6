"""How processes that use comm_core begin and end: who finalizes MPI, what a fork sees, and that nothing blocks at exit."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from tests.harness import run_ranks, run_script

_run = functools.partial(run_script, real_start=True)

WORK = """
import numpy as np
def work(comm):
    data = np.ones(300_000)
    comm.all_reduce(data, data)
    assert data[0] == data[-1] == comm.size
    comm.post((comm.rank + 1) % comm.size, b"bye")
"""

ENDINGS = {
    "nothing is called": "import comm_core\nwork(comm_core.mpi())\n",
    "finalize": "import comm_core\nwork(comm_core.mpi())\ncomm_core.finalize()\ncomm_core.finalize()\n",
    "close and finalize": "import comm_core\nc = comm_core.mpi()\nwork(c)\nc.close()\ncomm_core.finalize()\nc.close()\n",
    "mpi4py first": "from mpi4py import MPI\nimport comm_core\nwork(comm_core.mpi(MPI.COMM_WORLD))\n",
    "mpi4py first and finalizes": (
        "from mpi4py import MPI\nimport comm_core\nwork(comm_core.mpi(MPI.COMM_WORLD))\nMPI.Finalize()\n"
    ),
    "mpi4py first, then both finalize": (
        "from mpi4py import MPI\nimport comm_core\nwork(comm_core.mpi())\ncomm_core.finalize()\n"
        "assert not MPI.Is_finalized()\nMPI.COMM_WORLD.Barrier()\nMPI.Finalize()\n"
    ),
    "mpi4py last": (
        "import comm_core\nc = comm_core.mpi()\nwork(c)\nfrom mpi4py import MPI\n"
        "assert MPI.COMM_WORLD.Get_size() == c.size\nMPI.COMM_WORLD.Barrier()\nwork(c)\n"
    ),
    "mpi4py last and finalizes": (
        "import comm_core\nc = comm_core.mpi()\nwork(c)\nfrom mpi4py import MPI\nwork(c)\nMPI.Finalize()\n"
        "comm_core.finalize()\nc.close()\n"
    ),
    "a communicator of mpi4py": (
        "from mpi4py import MPI\nimport comm_core\n"
        "half = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank)\nc = comm_core.mpi(half)\nassert c.size == 1\nwork(c)\n"
        "work(comm_core.mpi(MPI.COMM_WORLD))\nwork(comm_core.mpi())\n"
    ),
    "works are dropped": (
        "import comm_core\nc = comm_core.mpi()\nfor _ in range(20):\n"
        "    c.all_reduce_async(np.ones(200_000), np.ones(200_000))\n"
    ),
    "references survive in a cycle": (
        "import comm_core\nclass A: pass\na = A(); a.me = a; a.c = comm_core.mpi(); a.s = a.c.split(0)\n"
        "a.w = a.c.barrier_async()\nwork(a.c)\n"
    ),
}


@pytest.mark.parametrize("how", ENDINGS)
def test_every_way_to_end_is_clean(how: str, tmp_path: Path) -> None:
    result = _run(tmp_path, f"{WORK}\n{ENDINGS[how]}\nprint('reached the end', flush=True)\n").check()
    assert result.output.count("reached the end") == 2
    assert "rror" not in result.output, result.output


def test_importing_starts_nothing(tmp_path: Path) -> None:
    text = """
import os, threading
import comm_core
assert len(os.listdir("/proc/self/task")) == 1 and threading.active_count() == 1
assert comm_core.mpi_available()
from mpi4py import rc
rc.initialize = False
from mpi4py import MPI
assert not MPI.Is_initialized()
print(comm_core.build_info())
"""
    result = run_ranks(1, ["-c", text], "single", cwd=tmp_path).check()
    assert "MPI" in result.output


def test_mpi_without_a_launcher_is_a_world_of_one(tmp_path: Path) -> None:
    text = f"{WORK}\nimport comm_core\nc = comm_core.mpi()\nassert (c.rank, c.size) == (0, 1)\nwork(c)\n"
    run_ranks(1, ["-c", text], "single", cwd=tmp_path).check()


def test_whoever_initialises_mpi_has_to_ask_for_threads(tmp_path: Path) -> None:
    """Its owner calls MPI too, at the latest to finalize it, while comm_core's thread may be inside."""
    text = """
import sys
from mpi4py import rc
rc.thread_level = "serialized"
from mpi4py import MPI
assert MPI.Query_thread() == MPI.THREAD_SERIALIZED
import comm_core
try:
    comm_core.mpi()
except comm_core.Unsupported as e:
    print("refused:", e)
"""
    result = run_ranks(1, ["-c", text], "single", cwd=tmp_path, real_start=True).check()
    assert "refused:" in result.output
    assert "MPI_THREAD_MULTIPLE" in result.output


def test_a_forked_child_is_told(tmp_path: Path) -> None:
    text = """
import os, sys
import numpy as np
import comm_core
c = comm_core.mpi()
data = np.ones(10)
unfinished = c.recv_async(np.ones(3), c.rank, 5)
c.all_reduce(data, data)
child = os.fork()
if child == 0:
    try:
        for use in (lambda: c.barrier(), lambda: unfinished.wait(5), lambda: c.split(0), lambda: comm_core.mpi()):
            try:
                use()
            except comm_core.Error as e:
                assert "fork" in str(e), e
            else:
                os._exit(3)
        c.close()
        comm_core.finalize()
        del c, unfinished
        assert comm_core.local().size == 1
    except BaseException as e:
        print(repr(e), flush=True)
        os._exit(4)
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
c.send(np.ones(3), c.rank, 5)
unfinished.wait(10)
c.barrier()
print("parent goes on", flush=True)
"""
    assert _run(tmp_path, text).check().output.count("parent goes on") == 2


def test_an_uncaught_exception_ends_the_job_with_its_traceback(tmp_path: Path) -> None:
    text = """
import numpy as np
import comm_core
c = comm_core.mpi()
if c.rank == 1:
    raise ValueError("the cause")
c.all_reduce(np.ones(10), np.ones(10))
"""
    result = _run(tmp_path, text)
    assert not result.timed_out
    assert result.returncode != 0
    assert result.output.count("ValueError: the cause") == 1


def test_operations_that_nobody_answers_do_not_block_the_end(tmp_path: Path) -> None:
    text = """
import numpy as np
import comm_core
c = comm_core.mpi()
if c.rank == 0:
    c.recv_async(np.ones(10), 1, 3, label="lonely")
"""
    result = _run(tmp_path, text, COMM_CORE_EXIT_SECONDS="2")
    assert not result.timed_out
    assert result.returncode != 0
    assert "COMM_CORE_EXIT_SECONDS" in result.output


@pytest.mark.parametrize(("ranks", "make"), [(1, "local"), (2, "mpi")])
def test_threads_that_wait_do_not_crash_the_end(ranks: int, make: str, tmp_path: Path) -> None:
    """Daemon threads want the GIL back while the interpreter goes away: what they wait for comes to its end then."""
    text = f"""
import sys, threading, time
import numpy as np
import comm_core
c = comm_core.{make}()
def wait():
    try:
        c.recv_async(np.ones(1), c.rank).wait()
    except comm_core.Error:
        pass
def read():
    try:
        c.receive_post(0.6)
    except comm_core.Error:
        pass
for target in (wait, read) * 3:
    threading.Thread(target=target, daemon=True).start()
time.sleep(0.2)
class Slow:
    def __del__(self):
        time.sleep(0.5)
sys.slow = Slow()
c.barrier()
print("reached the end", flush=True)
"""
    result = _run(tmp_path, text, ranks, COMM_CORE_EXIT_SECONDS="2")
    assert result.output.count("reached the end") == ranks
    assert "terminate called" not in result.output, result.output
    assert make == "mpi" or result.returncode == 0


@pytest.mark.full
def test_numbers_are_the_same_where_subnormal_ones_are_flushed(tmp_path: Path) -> None:
    """What is subnormal in 16 bits is no such number in fp32; the thread that sums inherits how it counts."""
    text = """
import numpy as np, torch
import comm_core
torch.set_flush_denormal(True)
c = comm_core.mpi()
numbers = np.full(13, 2.0**-20, np.float16)
c.all_reduce(numbers, numbers)
assert (numbers.view(np.int16) == 32).all(), numbers.view(np.int16)
"""
    _run(tmp_path, text).check()


def test_abort_ends_all_ranks(tmp_path: Path) -> None:
    text = """
import comm_core
c = comm_core.mpi()
if c.rank == 0:
    comm_core.abort(7)
c.barrier()
"""
    result = _run(tmp_path, text)
    assert not result.timed_out
    assert result.returncode == 7
    alone = run_ranks(1, ["-c", "import comm_core\ncomm_core.local()\ncomm_core.abort(9)"], "single", cwd=tmp_path)
    assert alone.returncode == 9


@pytest.mark.parametrize(
    ("name", "value"), [("COMM_CORE_SEGMENT_BYTES", "12"), ("COMM_CORE_WINDOW", "many"), ("COMM_CORE_IDLE_MS", "-1")]
)
def test_settings_that_do_not_parse(name: str, value: str, tmp_path: Path) -> None:
    text = (
        "import comm_core, sys\ntry:\n    comm_core.mpi()\nexcept comm_core.InvalidUsage as e:\n    sys.exit(str(e))\n"
    )
    result = run_ranks(1, ["-c", text], "single", env={name: value}, cwd=tmp_path)
    assert f"{name}={value}" in result.output


@pytest.mark.full
def test_other_settings_compute_the_same(tmp_path: Path) -> None:
    """Tiny segments and windows take every path of the pipelines, over many messages."""
    for segment, window, small in (("64", "1", "0"), ("4096", "3", "100"), ("1000000", "2", "0")):
        env = {"COMM_CORE_SEGMENT_BYTES": segment, "COMM_CORE_WINDOW": window, "COMM_CORE_SMALL_BYTES": small}
        text = """
import itertools
import numpy as np
import comm_core
c = comm_core.mpi()
for count, kind in itertools.product((1, 5, 777, 20_011), ("f4", "f2", "i8")):
    data = (np.arange(count) % 50 + c.rank).astype(kind)
    total = np.zeros_like(data)
    expected = sum((np.arange(count) % 50 + r).astype(kind) for r in range(c.size))
    c.all_reduce(data, total)
    np.testing.assert_array_equal(total, expected)
    counts = [0, count, 0][: c.size] if c.size < 3 else [count // 3, 0, count - count // 3]
    part, whole = np.zeros(counts[c.rank], kind), np.zeros_like(data)
    c.reduce_scatter(data, part, counts=counts)
    c.all_gather(part, whole, counts=counts)
    np.testing.assert_array_equal(whole, expected)
    for root in range(c.size):
        c.reduce(data, total, root=root)
        c.broadcast(total, root)
        np.testing.assert_array_equal(total, expected)
    everybody = np.tile(data, c.size)
    c.all_to_all(everybody, out := np.zeros_like(everybody))
    np.testing.assert_array_equal(out, np.concatenate([(np.arange(count) % 50 + r).astype(kind) for r in range(c.size)]))
    c.post((c.rank + 1) % c.size, data.tobytes())
    assert len(c.receive_post(10)[1]) == data.nbytes
"""
        for ranks in (2, 3):
            _run(tmp_path, text, ranks, **env).check()


def test_waiting_is_polite(tmp_path: Path) -> None:
    """A rank that waits two seconds for its peer uses next to no CPU, and neither does one that is idle."""
    text = """
import time
import comm_core
c = comm_core.mpi()
c.barrier()
used = time.process_time()
if c.rank == 0:
    time.sleep(2)
c.barrier()
used = time.process_time() - used
print(f"cpu {used:.3f}", flush=True)
assert used < 0.4
"""
    _run(tmp_path, text).check()


def test_a_closed_group_costs_nothing(tmp_path: Path) -> None:
    """Also one with a letter on its way that nobody takes any more: the engine sleeps as if it had never been."""
    text = """
import time
from pathlib import Path
import comm_core
def naps():
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().strip() == "comm_core":
            return int((task / "status").read_text().split("voluntary_ctxt_switches:")[1].split()[0])
c = comm_core.mpi()
part = c.split(0)
if c.rank == 1:
    part.close()
c.barrier()
if c.rank == 0:
    part.post(1, bytes(1_000_000))
    part.close()
c.barrier()
time.sleep(0.5)
before = naps()
time.sleep(1)
print(f"naps {naps() - before}", flush=True)
assert naps() - before < 500  # 200 of 5 ms each
"""
    _run(tmp_path, text).check()


def test_python_objects_are_released_by_threads_that_may(tmp_path: Path) -> None:
    """The engine's has no interpreter lock. CPython cannot tell once there was a second interpreter."""
    text = """
import threading
import numpy as np
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters
import comm_core
from comm_core import Buffer, DType
interpreters.create()
released = []
class Owner:
    def __init__(self):
        self.data = np.ones(3000, np.float32)
    def buffer(self):
        return Buffer(self.data.ctypes.data, self.data.size, DType.FLOAT32, owner=self)
    def __del__(self):
        released.append(threading.get_native_id())
c = comm_core.mpi()
result = np.zeros(3000, np.float32)
for _ in range(1000):
    c.all_reduce_async(Owner().buffer(), result)
c.barrier()
assert len(released) == 1000, len(released)
assert set(released) == {threading.get_native_id()}
"""
    run_ranks(1, ["-c", text], "single", cwd=tmp_path, real_start=True).check()


def test_a_finalizer_may_use_the_communicator_that_held_its_object(tmp_path: Path) -> None:
    text = """
import numpy as np
import comm_core
from comm_core import Buffer, DType
c = comm_core.local()
class Owner:
    data = np.ones(4, np.float32)
    def buffer(self):
        return Buffer(self.data.ctypes.data, self.data.size, DType.FLOAT32, owner=self)
    def __del__(self):
        c.barrier()
        c.send_async(np.ones(4, np.float32), 0, 2)
        c.recv(np.zeros(4, np.float32), 0, 2)
        print("released", flush=True)
c.recv_async(Owner().buffer(), 0, 1)
c.send(np.ones(4, np.float32), 0, 1)
c.send_async(Owner().buffer(), 0, 1)
c.recv(np.zeros(4, np.float32), 0, 1)
print("went on", flush=True)
"""
    result = run_ranks(1, ["-c", text], "single", cwd=tmp_path, timeout=20).check()
    assert result.output.split("\n")[:3] == ["released", "released", "went on"]
