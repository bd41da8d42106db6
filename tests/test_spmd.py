"""The suites that run inside every rank: at 1, 2 and 4 ranks over MPI, and at 2 ranks over TCP, as under torchrun.

At 4 ranks over TCP, only the communicators': rings pass segments on from three ranks up. `sockets` is TCP as between
machines; else these processes copy from each other's memory.

Between them, those that compute with torch use each of its instruction sets that this machine has: what is bit for bit
must not hang on the width of vectors. Most of what is compared bit for bit is so at one and two ranks alone, so one job of
each of these sizes takes what torch chooses by itself (the widest, as users have it) and other jobs the narrower ones.
``ATEN_CPU_CAPABILITY=avx2 make test`` runs all of them with one.

The backend of torch.distributed has a suite of its own, under torchrun; it also runs over gloo.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness import JobFailed, Result, run_suite
from tests.skipped import reasons

BEST = ""  # what torch chooses by itself
_SECONDS = 2400.0  # minutes, and several times that on a busy machine: single tests have their own limit
JOBS = [  # the longest first
    pytest.param("spmd", "", "mpi", 2, "default", id="spmd-mpi-2"),
    pytest.param("spmd", "", "torchrun", 2, BEST, id="spmd-torchrun-2"),
    pytest.param("spmd", "", "mpi", 4, "avx2", id="spmd-mpi-4"),
    pytest.param("spmd", "", "mpi", 1, BEST, id="spmd-mpi-1"),
    pytest.param(
        *("spmd", "test_communicator.py", "torchrun", 4, BEST), id="communicator-torchrun-4", marks=pytest.mark.full
    ),
    *(pytest.param("comm_core", "", "mpi", size, BEST, id=f"comm_core-mpi-{size}") for size in (4, 2, 1)),
    *(pytest.param("comm_core", "", "tcp", size, BEST, id=f"comm_core-tcp-{size}") for size in (4, 2)),
    pytest.param("comm_core", "", "sockets", 4, BEST, id="comm_core-sockets-4"),
]


def _instruction_set(wanted: str) -> dict[str, str]:
    """The variable for torch, as the caller has it or as `wanted`; torch itself does not ask whether the machine can."""
    chosen = os.environ.get("ATEN_CPU_CAPABILITY", wanted)
    cpu = Path("/proc/cpuinfo")
    can = chosen == "default" or (cpu.exists() and re.search(rf"^flags\b.*\b{chosen}", cpu.read_text(), re.MULTILINE))
    return {"ATEN_CPU_CAPABILITY": chosen} if chosen and can else {}


@pytest.mark.timeout(_SECONDS + 60)
@pytest.mark.parametrize(("suite", "part", "launcher", "size", "instructions"), JOBS)
def test_suite(
    suite: str, part: str, launcher: str, size: int, instructions: str, record_property: Callable[[str, object], None]
) -> None:
    env = {"DEAR_SPMD_SUITE": suite, "DEAR_SPMD_PART": part, **_instruction_set(instructions)}
    over_tcp = launcher in ("tcp", "sockets")
    if over_tcp:  # mpirun only brings the ranks together
        env["COMM_CORE_TEST_BACKEND"] = launcher
    last, counts = _run(f"tests/{suite}/{part}", "mpi" if over_tcp else launcher, size, env)
    what, where = f"{suite} {part}".strip(), env.get("ATEN_CPU_CAPABILITY", "")
    record_property(
        "suite", f"{what:<10} {launcher:<9} {size} rank(s): {counts}, {last.seconds:.0f} s {where}".rstrip()
    )
    if not part:
        record_property("skipped", (f"{suite} {launcher} {size}", reasons(last.output)))


@pytest.mark.full
@pytest.mark.timeout(_SECONDS + 60)
def test_suite_on_a_pretended_device(record_property: Callable[[str, object], None]) -> None:
    """What a machine with a GPU runs, with memory of the host taken for a device's; see tests/spmd/device.py."""
    env = {"DEAR_SPMD_SUITE": "spmd", "DEAR_SPMD_PART": "", "DEAR_TEST_DEVICE": "pretended", "DEAR_TESTS": "fast"}
    last, counts = _run("tests/spmd", "mpi", 2, env)
    record_property("suite", f"spmd       pretended device, mpi, 2 rank(s): {counts}, {last.seconds:.0f} s")


@pytest.mark.timeout(_SECONDS + 60)
@pytest.mark.parametrize(
    ("backend", "size"),
    [
        ("dear", 2),
        ("dear", 4),
        pytest.param("dear", 1, marks=pytest.mark.full),
        pytest.param("gloo", 2, marks=pytest.mark.full),
        pytest.param("gloo", 4, marks=pytest.mark.full),
    ],
)
def test_suite_of_the_torch_backend(backend: str, size: int, record_property: Callable[[str, object], None]) -> None:
    """torch.distributed over our engine; all of it over gloo, too, which shows that the tests are right."""
    env = {"DEAR_SPMD_SUITE": "backend", "DEAR_SPMD_PART": "", "DEAR_TEST_C10D": backend}
    if backend == "gloo" or size == 1:  # which the fast tier has nothing of
        env["DEAR_TESTS"] = ""
    last, counts = _run("tests/backend", "torchrun", size, env)
    record_property("suite", f"backend    {backend}, torchrun {size} rank(s): {counts}, {last.seconds:.0f} s")
    record_property("skipped", (f"backend {backend} {size}", reasons(last.output)))


def _run(what: str, launcher: str, size: int, env: dict[str, str]) -> tuple[Result, str]:
    """The last of the jobs that it took, and how many tests passed in it. Raises :class:`JobFailed` where one failed."""
    plugins = ["tests.spmd_plugin", "no:cacheprovider", "no:logging"]
    options = ["-q", *(word for name in plugins for word in ("-p", name)), "--timeout", "180", "--color", "no"]
    argv = ["-m", "pytest", *options, "--timeout-method", "thread", what]
    # Tests leave operations that one rank alone has issued, of which the watchdog would tell a minute later, in another,
    # and which it might take for the end of a job minutes later. Tests have limits of their own.
    env = {**env, "DEAR_STALL_WARN_SECONDS": "0", "DEAR_STALL_ABORT_SECONDS": "0"}
    *failed, last = run_suite(size, argv, launcher, timeout=_SECONDS, env=env)
    failures = []
    for result in (*failed, last):
        try:
            result.check()
        except JobFailed as failure:
            failures.append(str(failure))
    if failures:
        raise JobFailed("\n\n".join([f"{len(failures)} failed", *failures]))
    counts = re.findall(r"^(\d+ passed.*) in ", last.output, re.MULTILINE)
    assert counts, f"no rank reported how many tests passed:\n{last.output[-4000:]}"
    return last, counts[0]
