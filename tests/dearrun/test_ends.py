"""How dearrun ends where a worker, or mpirun itself, does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from dearrun import supervision
from dearrun.reports import Place
from dearrun.supervision import told
from tests.dearrun.processes import runs, wait_for

# An mpirun that starts one worker, whose output it does not wait for.
_MPIRUN = """#!/bin/sh
if [ "$1" = --version ]; then echo "mpirun (Open MPI) 5.0.11"; exit; fi
while [ "$1" != sh ]; do shift; done
export OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=1
"$@" &
while [ ! -e {folder}/number ]; do sleep 0.02; done
{then}
"""
_WORKER = "trap '' TERM; echo $$ > {folder}/new; mv {folder}/new {folder}/number; while :; do sleep 0.1; done"
# dearrun with less patience, for whom a worker is as one that waits for a broken disk: SIGKILL changes nothing.
_IMPATIENT = """
import os, pathlib, sys
from dearrun import cli, supervision
supervision._PATIENCE_SECONDS = supervision._AFTER_FAILURE_SECONDS = supervision._KILLED_SECONDS = 0.4
kill, stubborn = os.kill, pathlib.Path(sys.argv.pop(1))
os.kill = lambda process, number: None if str(process) == stubborn.read_text().strip() else kill(process, number)
cli.main()
"""


def _job(folder: Path, then: str, *program: str) -> subprocess.Popen[str]:
    mpirun = folder / "bin" / "mpirun"
    mpirun.parent.mkdir()
    mpirun.write_text(_MPIRUN.format(folder=folder, then=then))
    mpirun.chmod(0o755)
    command = [sys.executable, *program, "-np", "1", "sh", "-c", _WORKER.format(folder=folder)]
    return subprocess.Popen(command, env={**os.environ, "MPIPATH": str(folder)}, stderr=subprocess.PIPE, text=True)


def _number(folder: Path) -> int:
    wait_for((folder / "number").exists)
    return int((folder / "number").read_text())


def test_a_worker_that_mpirun_has_left_is_killed(tmp_path: Path) -> None:
    with _job(tmp_path, "exit 4", "-m", "dearrun") as process:
        _, said = process.communicate(timeout=30)
        assert (process.returncode, said.strip()) == (4, "")
    wait_for(lambda: not runs(_number(tmp_path)))


def test_a_worker_that_cannot_be_killed_is_named(tmp_path: Path) -> None:
    then = f"trap '' TERM; touch {tmp_path}/trapped; while :; do sleep 0.1; done"
    with _job(tmp_path, then, "-c", _IMPATIENT, str(tmp_path / "number")) as process:
        number = _number(tmp_path)
        wait_for((tmp_path / "trapped").exists)
        began = time.monotonic()
        process.terminate()
        try:
            _, said = process.communicate(timeout=30)
            assert time.monotonic() - began < 10
        finally:
            os.kill(number, signal.SIGKILL)
        assert process.returncode == 1
    first, second = said.splitlines()
    assert first == "dearrun: mpirun did not end within 0.4 s and is killed"
    begins = "dearrun: the job has ended, and workers are left that could not be killed: "
    assert second.startswith(f"{begins}rank 0 (process {number} on {os.uname().nodename}, state ")


def test_an_mpirun_that_does_not_end_a_job_that_has_failed_is_killed(tmp_path: Path) -> None:
    """It may wait for a host that answers no more."""
    then = f"kill -KILL $(cat {tmp_path}/number); while :; do sleep 0.1; done"
    with _job(tmp_path, then, "-c", _IMPATIENT, str(tmp_path / "number")) as process:
        _, said = process.communicate(timeout=30)
        assert process.returncode == 1
    assert said.strip() == "dearrun: mpirun did not end within 0.4 s and is killed"


def test_what_a_killed_mpirun_has_started_ends_with_it(tmp_path: Path) -> None:
    """Such as ssh to a host that answers no more."""
    then = f"sh -c 'sleep 1000; true' & echo $! >{tmp_path}/new2; mv {tmp_path}/new2 {tmp_path}/shell; trap '' TERM; "
    then += f"kill -KILL $(cat {tmp_path}/number); while :; do sleep 0.1; done"
    with _job(tmp_path, then, "-c", _IMPATIENT, str(tmp_path / "number")) as process:
        process.communicate(timeout=30)
    shell = int((tmp_path / "shell").read_text())
    wait_for(lambda: not runs(shell))


@pytest.mark.parametrize(
    ("number", "code", "sent"),
    [
        (signal.SIGTERM, 0, [signal.SIGTERM, signal.SIGKILL]),
        (signal.SIGINT, 128, [signal.SIGKILL]),  # Ctrl-C: the kernel has sent it to mpirun as well
        (signal.SIGUSR1, 0, [signal.SIGUSR1]),
        (signal.SIGCHLD, 1, []),
    ],
)
def test_what_mpirun_is_sent(
    number: signal.Signals, code: int, sent: list[signal.Signals], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a signal nothing comes for a minute. Then mpirun has ended, and another thread has taken SIGCHLD."""
    coming = iter([SimpleNamespace(si_signo=number, si_code=code), None, None, None])
    clock, ends, killed = iter(range(20, 200, 20)), iter([(0, 0), (0, 0), (0, 0), (7, 3 << 8)]), []
    monkeypatch.setattr(signal, "sigtimedwait", lambda heard, seconds: next(coming))
    monkeypatch.setattr(supervision, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    calls = {"waitpid": lambda child, options: next(ends), "kill": lambda child, number: killed.append(number)}
    constants = {"WNOHANG": os.WNOHANG, "waitstatus_to_exitcode": os.waitstatus_to_exitcode}
    monkeypatch.setattr(supervision, "os", SimpleNamespace(**calls, **constants))
    monkeypatch.setattr(supervision, "_below", lambda process, spared: [])
    assert supervision._ended(7, set(), None, lambda: None) == (3, signal.SIGKILL in sent)
    assert killed == sent


def test_a_process_that_has_the_number_of_a_worker_that_is_gone_is_another_one() -> None:
    mine = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    states = [supervision._state(Place("here", os.getpid(), began)) for began in (mine, mine + 1)]
    assert [bool(state) for state in states] == [True, False]


def test_workers_of_other_hosts_are_named_with_them() -> None:
    said = told({(0, Place("a", 7, 1)): "D", (3, Place("b", 8, 2)): ""})
    assert said.endswith("could not be killed: rank 0 (process 7 on a, state D), rank 3 (process 8 on b)")
