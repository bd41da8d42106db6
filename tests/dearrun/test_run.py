"""dear.run: what comes back from ranks, what is raised, and what is left when a call ends."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import pickle
import re
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import pytest

import comm_core
import dear
from bench.emulation.cluster import Cluster
from dearrun.errors import LaunchError, RankError
from dearrun.exchange import VARIABLE, Answer, Exchange
from dearrun.run import _result
from overlap.job import cores
from overlap.job.settings import SettingError
from tests.dearrun.processes import runs
from tests.dearrun.test_worker import environ

LAUNCHERS = ["torchrun", *(["mpi"] if comm_core.mpi_available() else [])]


@pytest.fixture(autouse=True)
def _as_a_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what a launcher around these tests left."""
    kept = environ()
    for name in set(os.environ) - set(kept):
        monkeypatch.delenv(name)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_results_come_in_the_order_of_ranks(launcher: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Of ranks that communicate. What they print is shown, and what they get is what was given."""
    factor = 10

    def work(number: int, *, added: int) -> tuple[int, Any, list[str | None]]:
        import torch

        import dear

        dear.init()
        total = dear.allreduce(torch.tensor([float(dear.rank())]), op=dear.Sum)
        sys.stderr.write(f"rank {dear.rank()} is at work\n")
        told = [os.environ.get(name) for name in ("WORD", "OMP_NUM_THREADS", VARIABLE)]
        return dear.rank(), factor * total + number + added, told

    results = dear.run(work, (3,), {"added": 4}, np=2, use_mpi=launcher == "mpi", env={"WORD": "given"})
    threads = str(cores.among(cores.cores(), [cores.cores()] * 2, cores.limit()))
    assert [(rank, total.item(), told) for rank, total, told in results] == [
        (rank, 17.0, ["given", threads, None]) for rank in range(2)
    ]
    shown = capfd.readouterr().err
    assert "rank 0 is at work\n" in shown
    assert re.search(r"\[[^]]*1\]\S* ?rank 1 is at work" if launcher == "mpi" else "rank 1 is at work", shown)


def _rank() -> str:
    """Source of a function that needs no torch: jobs of it start at once."""
    return next(os.environ[name] for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK") if name in os.environ)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_what_ranks_raise_is_raised_with_their_tracebacks(launcher: str, tmp_path: Path) -> None:
    """Of each that has raised by then; those that wait for them are ended."""
    rank_of = _by_value(_rank)

    class OddError(Exception):
        def __init__(self, number: int, word: str) -> None:
            super().__init__(f"{number} is {word}")

    def fail() -> None:
        rank = int(rank_of())
        if rank == 0:
            time.sleep(60)
        (tmp_path / str(rank)).touch()
        while not (tmp_path / str(3 - rank)).exists():  # however much later that rank starts
            time.sleep(0.01)
        if rank == 1:
            raise ValueError(f"rank {rank} cannot go on")
        raise OddError(rank, "odd")

    began = time.monotonic()
    with pytest.raises(RankError) as caught:
        dear.run(fail, np=3, use_mpi=launcher == "mpi")
    assert time.monotonic() - began < 40
    error = caught.value
    assert error.rank in (1, 2)
    assert set(error.exceptions) == set(error.tracebacks) == {1, 2}
    assert isinstance(error.exceptions[1], ValueError)
    assert str(error.exceptions[1]) == "rank 1 cannot go on"
    # What cannot be unpickled comes with its words.
    assert repr(error.exceptions[2]) == "RuntimeError('OddError: 2 is odd')"
    assert 'raise ValueError(f"rank {rank} cannot go on")' in error.tracebacks[1]
    assert "function.py" not in error.tracebacks[1]
    assert re.match(rf"rank {error.rank} of 3 raised .*\n\nTraceback ", str(error))
    assert f"Other ranks raised, too:\nrank {3 - error.rank}: " in str(error)


def _by_value(function: Callable[[], str]) -> Callable[[], str]:
    """It travels with the function that refers to it, as one of a notebook does: ranks need not import these tests."""
    import types

    return types.FunctionType(function.__code__, {"os": os, "__name__": "__main__"}, function.__name__)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_rank_that_dies_is_named(launcher: str) -> None:
    rank_of = _by_value(_rank)

    def die() -> None:
        if rank_of() == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    with pytest.raises(RankError, match=r"^rank 1 of 2 ended without an answer") as caught:
        dear.run(die, np=2, use_mpi=launcher == "mpi")
    assert (caught.value.rank, caught.value.exceptions) == (1, {})


def test_what_cannot_be_pickled_says_so() -> None:
    with pytest.raises(TypeError, match="pickle"):
        dear.run(time.sleep, (threading.Lock(),), np=1)
    with pytest.raises(RankError, match="the function returned a generator, which cannot be pickled"):
        dear.run(lambda: (number for number in range(2)), np=1)
    with pytest.raises(RankError, match="SystemExit: 3"):
        dear.run(lambda: sys.exit(3), np=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "how many workers"),
        ({"np": 0}, "should be a whole number of at least 1 and is 0"),
        ({"np": 3, "hosts": "localhost:2"}, "-np 3 needs 3 slots, and localhost:2 has 2"),
        ({"np": 1, "network_interface": "eth77"}, "names 'eth77', and .* has no such interface: it has "),
        ({"use_mpi": False}, "np should be a whole number of at least 1 and is None"),
        ({"np": 2, "hosts": "a:2", "use_mpi": False}, "-H needs MPI"),
        ({"np": 2, "hosts": "a:2", "use_mpi": None, "use_gloo": True}, "-H needs MPI"),
        ({"use_mpi": None, "use_gloo": False}, "how many workers"),
        ({"np": 1, "use_gloo": True}, "use_mpi=True and use_gloo=True contradict each other"),
        ({"np": 1, "start_timeout": 0.0}, r"1 of 1 ranks did not start \(ranks 0\): start_timeout=0 s are over"),
        (
            {"np": 2, "env": {"SLURM_JOB_ID": "7"}},
            "an allocation of a scheduler: name its hosts, hosts='host1:2,host2:2'",
        ),
        ({"np": 1, "mpi_args": "--no-such-flag"}, r"did not start \(ranks 0\): their launcher ended with status"),
    ],
)
def test_jobs_that_cannot_start(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        dear.run(time.sleep, (60,), **{"use_mpi": True, **arguments})


def test_settings_that_make_no_sense_are_refused_here() -> None:
    with pytest.raises(SettingError, match="DEAR_POISON should hold 0 or 1 and holds 'maybe'"):
        dear.run(time.sleep, (0,), np=1, env={"DEAR_POISON": "maybe"})


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_what_ranks_print_can_go_into_files(launcher: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def say() -> None:
        sys.stdout.write(f"{os.environ['OMP_NUM_THREADS']} to a file\n")

    told = {"OMP_NUM_THREADS": "77"}  # the caller's own counts
    dear.run(say, np=1, use_mpi=launcher == "mpi", env=told, output_filename=str(tmp_path), verbose=True)
    assert (tmp_path / "rank.0" / "stdout").read_text() == "77 to a file\n"
    assert re.match(r"dear.?run: .* dearrun\.function\n", capfd.readouterr().err)


# As somebody types it. Nothing of it is in a module that ranks could import.
_TYPED = """
import dear
class Net:
    def __init__(self, width):
        self.width = width

def train(width):
    import os
    print("a rank speaks")
    return Net(width)

results = dear.run(train, (5,), np=2)
print("widths", [result.width for result in results], type(results[0]) is Net)
dear.run(lambda: 1 / 0, np=1)
print("and on")
"""


def test_an_interactive_session() -> None:
    command = [sys.executable, "-i", "-q"]
    typed = subprocess.run(command, input=_TYPED, capture_output=True, text=True, timeout=90, env=environ(), check=True)
    assert "widths [5, 5] True" in typed.stdout
    assert typed.stdout.count("a rank speaks") == 2
    assert "RankError: rank 0 of 1 raised ZeroDivisionError: division by zero" in typed.stderr
    assert "and on" in typed.stdout


def test_a_session_whose_output_is_no_file() -> None:
    """As in a notebook, which takes what is written to sys.stdout; a progress bar of rank 0's comes as it is."""
    typed = (
        "import contextlib, io, sys, dear\n"
        "def rank(): sys.stdout.write('50%\\rdone\\n')\n"
        "with contextlib.redirect_stdout(io.StringIO()) as cell: dear.run(rank, np=1)\n"
        "sys.exit(repr(cell.getvalue()))\n"
    )
    said = subprocess.run([sys.executable, "-c", typed], capture_output=True, text=True, timeout=90, env=environ())
    assert (said.stdout, said.stderr) == ("", repr("50%\rdone\n") + "\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ranks_end_with_their_caller(launcher: str, number: signal.Signals, tmp_path: Path) -> None:
    """With one that Ctrl-C interrupts, before it goes on; with one that is killed, by themselves."""
    typed = (
        "import os, pathlib, sys, time, dear\n"
        "def wait():\n"
        "    new = pathlib.Path(sys.argv[1], f'{os.getpid()}.new')\n"
        "    new.touch()\n"
        "    new.rename(new.with_suffix('.there'))\n"
        "    time.sleep(60)\n"
        f"argv = {str(tmp_path)!r}\n"
        "try: dear.run(lambda: (setattr(sys, 'argv', ['', argv]), wait()), np=2, use_mpi=bool(int(sys.argv[1])))\n"
        "except KeyboardInterrupt: sys.exit(7)\n"
    )
    command = [sys.executable, "-c", typed, str(int(launcher == "mpi"))]
    heeding = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # tests in a shell's background do not
    with subprocess.Popen(command, env=environ(), stderr=subprocess.DEVNULL, preexec_fn=heeding) as caller:
        deadline = time.monotonic() + 60
        while len(there := list(tmp_path.glob("*.there"))) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        caller.send_signal(number)
        assert caller.wait(120) == (
            7 if number == signal.SIGINT else -number
        )  # a job that does not end is killed after 60
    deadline = time.monotonic() + (0 if number == signal.SIGINT else 30)
    while any(runs(int(file.stem)) for file in there):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _all_of(connection: Connection[Any, Any]) -> bytes:
    heard = b""
    with contextlib.suppress(EOFError, ConnectionResetError):
        while True:
            heard += connection.recv_bytes()
    return heard


def test_nobody_without_the_key_gets_or_says_anything() -> None:
    exchange = Exchange(b"secret", [])
    try:
        told = json.loads(exchange.variable)
        place = told["places"][0]
        assert stat.S_IMODE(Path(place).parent.stat().st_mode) == 0o700
        with pytest.raises(AuthenticationError):
            Client(place, authkey=b"guessed")
        with Client(place) as stranger:  # who sends a letter at once
            stranger.send_bytes(pickle.dumps("run me"))
            heard = _all_of(stranger)
            assert heard
            assert b"secret" not in heard
        time.sleep(0.1)
        assert exchange.events.empty()
    finally:
        exchange.close()
    assert not Path(place).parent.exists()


def test_a_result_that_cannot_be_unpickled_names_its_rank() -> None:
    with pytest.raises(RankError, match=r"^what rank 3 returned cannot be unpickled here: \w*Error: ") as caught:
        _result(Answer(3, b"nonsense"))
    assert (caught.value.rank, set(caught.value.exceptions)) == (3, {3})


@pytest.mark.needs_root
def test_two_hosts() -> None:
    typed = (
        "import sys, dear\n"
        "def host():\n"
        "    import os, time\n"
        "    time.sleep(0.5)\n"
        "    return os.uname().nodename\n"
        "print(dear.run(host, np=2, hosts=sys.argv[1]))\n"
    )
    with Cluster(2) as cluster:
        agents = dict.fromkeys(("PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_rsh_agent"), cluster.agent)
        hosts = ",".join(f"{cluster.address(host)}:1" for host in range(2))
        command = cluster.enter(0, [sys.executable, "-c", typed, hosts])
        said = subprocess.run(command, capture_output=True, text=True, timeout=90, env=environ(**agents), check=False)
    assert said.returncode == 0, said.stderr
    assert len(set(re.findall(r"'(\w+)'", said.stdout))) == 2


class _Closed(io.StringIO):
    """A stream of a notebook whose reader has gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


@pytest.mark.parametrize("stream", ["ascii", "closed", "none"])
def test_what_a_stream_here_refuses_holds_up_no_rank(stream: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks print more than a pipe holds."""
    held = io.BytesIO()
    streams: dict[str, Any] = {
        "ascii": io.TextIOWrapper(held, encoding="ascii"),
        "closed": _Closed(),
        "none": None,
    }
    monkeypatch.setattr(sys, "stdout", streams[stream])

    def say() -> int:
        sys.stdout.buffer.write(("é" * 200_000).encode())
        sys.stdout.flush()
        return int(os.environ["RANK"])

    assert dear.run(say, np=2, use_mpi=False, use_gloo=True) == [0, 1]
    if stream == "ascii":
        assert held.getvalue().count(b"\\xe9") == 400_000


def test_neither_launcher_means_to_choose(capfd: pytest.CaptureFixture[str]) -> None:
    """As in Horovod's own example."""
    assert dear.run(lambda: 3, np=1, use_mpi=False, use_gloo=False, verbose=True) == [3]
    assert ("dearrun.torchrun" in capfd.readouterr().err) is not comm_core.mpi_available()
