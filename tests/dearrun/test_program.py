"""dearrun as users start it."""

from __future__ import annotations

import functools
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.emulation.cluster import Cluster
from dearrun import cli
from dearrun.errors import LaunchError
from dearrun.options import parser
from tests.dearrun.processes import runs, wait_for
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
    """Process numbers come again; a program makes leftovers of its own or of the next, then becomes mpirun."""
    left = (
        "import os, pathlib, sys; folder, count, *command = sys.argv[1:]\n"
        "for number in range(os.getpid(), os.getpid() + int(count)):\n"
        "    made = pathlib.Path(folder, f'ompi.{number}'); made.mkdir()\n"
        "    (made / f'pmix.{os.uname().nodename}.tool.{number}').touch()\n"
        "os.execv(command[0], command)\n"
    )
    for count, command in (
        (1, [str(ROOT / "scripts" / "mpirun"), "-np", "1", "true"]),
        (3000, _command("-np", "1", "true")),  # mpirun is one of these, however many threads others start
    ):
        folder = tmp_path / str(count)
        folder.mkdir()
        started = [sys.executable, "-S", "-c", left, str(folder), str(count), *command]
        environ = _environ() | {"TMPDIR": str(folder)}
        result = subprocess.run(started, capture_output=True, text=True, timeout=60, env=environ, check=False)
        assert result.returncode == 0, result.stdout + result.stderr
        assert len(list(folder.iterdir())) == count - 1


def _fake_mpirun(folder: Path, body: str) -> dict[str, str]:
    """The environment in which dearrun takes a shell script for Open MPI's mpirun."""
    program = folder / "bin" / "mpirun"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then echo "mpirun (Open MPI) 5.0.11"; exit; fi\n{body}\n')
    program.chmod(0o755)
    return {"MPIPATH": str(folder)}


_RUN_RANK = 'run() { (while [ "$1" != sh ]; do shift; done; OMPI_COMM_WORLD_RANK=$rank "$@"); }\n'


@pytest.mark.parametrize(
    ("body", "status", "written", "said"),
    [
        ("exit 0", 1, 0, "the end of 2 of 2 workers was not reported (ranks 0, 1)"),
        (
            'rank=0; run "$@"; exit 0',
            1,
            1,
            "the end of 1 of 2 workers was not reported (ranks 1): the connection to their",
        ),
        ('for rank in 1 0; do run "$@"; done; exit 0', 0, 2, ""),
        ('rank=0; run "$@"; exit 4', 4, 1, ""),
    ],
)
def test_a_job_of_which_not_all_workers_ended_is_no_success(
    body: str, status: int, written: int, said: str, tmp_path: Path
) -> None:
    """Whatever mpirun says. What workers write to stderr comes as it is."""
    environ = _environ() | _fake_mpirun(tmp_path, _RUN_RANK + body)
    command = _command("-np", "2", "--no-tag-output", "sh", "-c", "printf 'of mine' >&2")
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environ, check=False)
    assert (result.returncode, said in result.stderr) == (status, True), result.stderr
    assert result.stderr.startswith("of mine" * written)
    assert len(result.stderr.splitlines()) <= 1


def test_a_status_that_mpirun_forgets_counts(tmp_path: Path) -> None:
    environ = _environ() | _fake_mpirun(tmp_path, _RUN_RANK + 'for rank in 0 1; do run "$@"; done; exit 0')
    result = subprocess.run(_command("-np", "2", "sh", "-c", "exit 5"), timeout=60, env=environ, check=False)
    assert result.returncode == 5


def test_where_mpirun_puts_the_output_elsewhere_its_status_counts_and_a_line_says_so(tmp_path: Path) -> None:
    environ = _environ() | _fake_mpirun(tmp_path, "exit 0")
    for options, status, said in (
        (f"--output dir={tmp_path}", 0, "dearrun: mpirun's status alone counts, .*: with --output of --mpi-args .*\n"),
        (f"--wdir {tmp_path}/output", 1, "dearrun: .* the end of 2 of 2 workers was not reported .*\n"),
    ):
        command = _command("-np", "2", "--mpi-args", options, "true")
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environ, check=False)
        assert result.returncode == status
        assert re.fullmatch(said, result.stderr), result.stderr


@pytest.mark.needs_root
def test_a_job_that_loses_its_connection_to_a_host_is_no_success() -> None:
    """Open MPI 5's mpirun then ends with 0."""
    with Cluster(2) as cluster:
        agents = dict.fromkeys(("PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_rsh_agent"), cluster.agent)
        hosts = ",".join(f"{cluster.address(host)}:1" for host in range(2))
        job = _command("-np", "2", "-H", hosts, "sh", "-c", "echo up; sleep 30")
        with subprocess.Popen(
            cluster.enter(0, job), env=_environ() | agents, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            assert all("up" in process.stdout.readline() for _ in range(2))
            subprocess.run(cluster.enter(0, ["ss", "--kill", "--tcp"]), check=True, stdout=subprocess.DEVNULL)
            _, said = process.communicate(timeout=30)
        assert process.returncode != 0
        assert "not reported (ranks 0, 1): the connection to their hosts was probably lost" in said


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


def test_a_parent_that_ignores_the_ends_of_processes_changes_nothing() -> None:
    ignoring = functools.partial(signal.signal, signal.SIGCHLD, signal.SIG_IGN)
    job = _command("-np", "1", "sh", "-c", "exit 3")
    assert subprocess.run(job, timeout=60, env=_environ(), preexec_fn=ignoring, check=False).returncode == 3


def _prepared(environ: dict[str, str], *argv: str) -> cli.Prepared:
    return cli.prepare(parser().parse_args([*argv, sys.executable]), environ)


def test_how_to_reach_hosts_is_left_to_mpis_own_arguments(tmp_path: Path) -> None:
    environ, hosts = {**_fake_mpirun(tmp_path, ""), "PATH": str(tmp_path)}, ["-H", "no-such-host.invalid:1"]
    with pytest.raises(LaunchError, match="neither ssh nor rsh"):
        _prepared(environ, *hosts)
    assert _prepared(environ, *hosts, "--mpi-args=--mca plm_rsh_agent mine").job.workers == 1


def test_workers_listen_on_no_port_if_they_are_on_this_machine_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _folder: SimpleNamespace(free=1 << 40))
    environ = {**_fake_mpirun(tmp_path, ""), "PATH": os.environ["PATH"]}
    assert _prepared(environ, "-np", "2").environ["OMPI_MCA_btl"] == "^tcp,ofi"
    assert _prepared(environ, "-H", "localhost:2").environ.get("OMPI_MCA_btl") != "^tcp,ofi"


def test_lines_carry_their_rank() -> None:
    result = _dearrun("-np", "2", "echo", "here")
    assert result.returncode == 0, result.stderr
    lines = sorted(line for line in result.stdout.splitlines() if "here" in line)
    assert len(lines) == 2
    assert all(str(rank) in line.replace("here", "") for rank, line in enumerate(lines))


@pytest.mark.parametrize(
    ("number", "succeeds"), [(signal.SIGTERM, False), (signal.SIGINT, False), (signal.SIGUSR1, True)]
)
def test_signals_reach_the_workers(number: signal.Signals, succeeds: bool, tmp_path: Path) -> None:
    """SIGTERM where mpirun is to end the job, and what it hands on. A worker that ends well then has ended well."""
    # mpirun kills what has not ended half a second later: the worker has nothing to finish first.
    trap = f"trap 'echo > {tmp_path}/stopped; exit 0' TERM USR1; touch {tmp_path}/ready"
    with _started(tmp_path, f"{trap}; while :; do sleep 1 & wait $!; done") as process:
        process.send_signal(number)
        assert (process.wait(30) == 0) is succeeds
    assert (tmp_path / "stopped").exists()


def test_a_dearrun_that_is_killed_takes_its_job_with_it(tmp_path: Path) -> None:
    with _started(tmp_path, f"echo $$ > {tmp_path}/number; touch {tmp_path}/ready; exec sleep 60") as process:
        worker = int((tmp_path / "number").read_text())
        assert runs(worker)
        process.kill()
    wait_for(lambda: not runs(worker))


def _started(folder: Path, script: str) -> subprocess.Popen[bytes]:
    """A job of one worker, which has made a file named ready."""
    command = _command("-np", "1", "sh", "-c", script)
    process = subprocess.Popen(command, env=_environ(), stderr=subprocess.DEVNULL)
    wait_for((folder / "ready").exists)
    return process


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["-np", "3", "-H", "localhost:2", "true"], "dearrun: -np 3 needs 3 slots, and localhost:2 has 2"),
        (["-np", "1", "no-such-program"], "dearrun: 'no-such-program' was not found"),
        (
            ["-np", "1", "-x", "DEAR_POISON=maybe", "true"],
            "dearrun: environment variable DEAR_POISON should hold 0 or 1 and holds 'maybe': correct or unset it",
        ),
        (
            ["-np", "1", "-x", "COMM_CORE_WINDOW=maybe", "true"],
            "dearrun: environment variable COMM_CORE_WINDOW=maybe: expected an integer from 1 to 1024; correct or unset",
        ),
        (
            ["-np", "1", "-x", "DEAR_BACKEND=gloo", "true"],
            "dearrun: environment variable DEAR_BACKEND should hold one of mpi, torch, single and holds 'gloo': correct or",
        ),
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
