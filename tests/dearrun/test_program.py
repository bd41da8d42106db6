"""dearrun as users start it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from bench.cluster import Cluster
from tests.harness import ROOT


def _command(*argv: str) -> list[str]:
    return [sys.executable, "-m", "dearrun", *argv]


def _environ() -> dict[str, str]:
    """Without what a launcher around these tests left."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMIX_", "PRTE_"))}


def _dearrun(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(_command(*argv), capture_output=True, text=True, timeout=60, env=_environ(), check=False)


def test_more_workers_than_cores_each_in_its_own_folder(tmp_path: Path) -> None:
    workers = (os.cpu_count() or 1) + 1
    options = ["-np", str(workers), "--verbose", "-x", "WORD=hello", "--output-filename", str(tmp_path)]
    result = _dearrun(*options, "--log-level", "info", "sh", "-c", "echo $WORD $DEAR_LOG_LEVEL; echo bad >&2")
    assert result.returncode == 0, result.stderr
    assert f"-np {workers}" in result.stderr.splitlines()[0]
    folders = sorted(tmp_path.iterdir())
    assert [folder.name for folder in folders] == [f"rank.{rank}" for rank in range(workers)]
    assert {(folder / "stdout").read_text() for folder in folders} == {"hello info\n"}
    assert {(folder / "stderr").read_text() for folder in folders} == {"bad\n"}


def test_scripts_run_if_they_are_executable(tmp_path: Path) -> None:
    script, other = tmp_path / "train.py", tmp_path / "other"
    for file in (script, other):
        file.write_text("#!/bin/sh\necho it runs\n")
    assert "python" in _dearrun("-np", "1", str(script)).stderr
    assert f"is not executable, so no worker can run it: chmod +x {other}" in _dearrun("-np", "1", str(other)).stderr
    for file in (script, other):
        file.chmod(0o755)
        assert "it runs" in _dearrun("-np", "1", str(file)).stdout


def test_what_a_killed_mpirun_of_the_same_number_left_is_no_obstacle(tmp_path: Path) -> None:
    """Process numbers come again; a shell makes the leftovers of its own before it becomes dearrun."""
    left = 'mkdir -p "$TMPDIR/ompi.$$" && touch "$TMPDIR/ompi.$$/pmix.$(uname -n).tool.$$" && exec "$@"'
    other = tmp_path / "ompi.1"
    other.mkdir()
    for command in (_command("-np", "1", "true"), [str(ROOT / "scripts" / "mpirun"), "-np", "1", "true"]):
        started = ["sh", "-c", left, "sh", *command]
        environ = _environ() | {"TMPDIR": str(tmp_path)}
        result = subprocess.run(started, capture_output=True, text=True, timeout=60, env=environ, check=False)
        assert result.returncode == 0, result.stdout + result.stderr
    assert list(tmp_path.iterdir()) == [other]


@pytest.mark.needs_root
def test_each_host_gets_as_many_workers_as_it_has_slots(tmp_path: Path) -> None:
    """With dearrun, and with mpirun's own flags; where there are more workers than slots, hosts share them."""
    file, mpirun = tmp_path / "hosts", str(ROOT / "scripts" / "mpirun")
    with Cluster(2) as cluster:
        agents = dict.fromkeys(("PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_rsh_agent"), cluster.agent)
        hosts = ",".join(f"{cluster.address(host)}:2" for host in range(2))
        file.write_text("".join(f"{cluster.address(host)} slots=2\n" for host in range(2)))
        for start, expected in (
            (_command("-np", "4", "-H", hosts, "--no-tag-output"), [2, 2]),
            ([mpirun, "-np", "3", "--host", hosts], [1, 2]),
            ([mpirun, "-np", "6", "--hostfile", str(file)], [3, 3]),
        ):
            # Where workers on two hosts end at once, Open MPI 5's prterun sometimes waits for ever after all of them.
            command = cluster.enter(0, [*start, "sh", "-c", "uname -n; sleep 0.5"])
            environ = _environ() | agents
            result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environ, check=False)
            assert result.returncode == 0, result.stderr
            assert sorted(Counter(result.stdout.split()).values()) == expected, result.stdout


def test_the_exit_status_is_the_workers() -> None:
    assert _dearrun("-np", "1", "sh", "-c", "exit 3").returncode == 3


def test_lines_carry_their_rank() -> None:
    result = _dearrun("-np", "2", "echo", "here")
    assert result.returncode == 0, result.stderr
    lines = sorted(line for line in result.stdout.splitlines() if "here" in line)
    assert len(lines) == 2
    assert all(str(rank) in line.replace("here", "") for rank, line in enumerate(lines))


def test_signals_reach_the_workers(tmp_path: Path) -> None:
    # mpirun kills what has not ended half a second later: the worker has nothing to finish first.
    script = (
        f"trap 'echo > {tmp_path}/stopped; exit 0' TERM; touch {tmp_path}/ready; while :; do sleep 1 & wait $!; done"
    )
    with subprocess.Popen(
        _command("-np", "1", "sh", "-c", script), env=_environ(), stderr=subprocess.DEVNULL
    ) as process:
        deadline = time.monotonic() + 30
        while not (tmp_path / "ready").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) != 0
    assert (tmp_path / "stopped").exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["-np", "3", "-H", "localhost:2", "true"], "dearrun: -np 3 needs 3 slots, and localhost:2 has 2"),
        (["-np", "1", "no-such-program"], "dearrun: 'no-such-program' was not found"),
    ],
)
def test_mistakes_are_one_line(argv: list[str], message: str) -> None:
    result = _dearrun(*argv)
    assert result.returncode == 1
    assert result.stderr.startswith(message)
    assert len(result.stderr.splitlines()) == 1


def test_check_build() -> None:
    result = _dearrun("--check-build")
    assert result.returncode == 0, result.stderr
    for found in (
        "[X] Python 3",
        "[X] PyTorch",
        "[X] comm_core",
        "NCCL",
        "[X] torch.distributed with gloo",
        "CUDA kernels",
    ):
        assert found in result.stdout
    if "[X] MPI backend" in result.stdout:
        assert "thread level: MPI_THREAD_" in result.stdout
