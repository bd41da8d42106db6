"""What workers find when they begin: their threads, and rank 0 the terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from dearrun import worker
from overlap.job import cores

_COLUMNS = 77


def environ(**variables: str) -> dict[str, str]:
    """Without what a launcher around these tests left."""
    left = ("OMPI_", "PMIX_", "PRTE_", "OMP_NUM_THREADS")
    return {name: value for name, value in os.environ.items() if not name.startswith(left)} | variables


def _dearrun(*argv: str, **variables: str) -> str:
    command = [sys.executable, "-m", "dearrun", "--no-tag-output", *argv]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=environ(**variables), check=True
    ).stdout


_SAY = ["sh", "-c", "echo ${OMP_NUM_THREADS-none} $(sed -n 's/Cpus_allowed_list:.//p' /proc/self/status)"]


def test_a_worker_that_fails_is_started_again_and_others_are_not(tmp_path: Path) -> None:
    script = tmp_path / "script.sh"
    script.write_text('n=$TORCHELASTIC_RESTART_COUNT; echo "$RANK of $WORLD_SIZE, $n"; test "$RANK,$n" != 1,0')
    said = _dearrun("-np", "2", "--restarts", "2", "sh", str(script))
    assert sorted(said.splitlines()) == ["0 of 2, 0", "1 of 2, 0", "1 of 2, 1"]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_share_the_cores_and_are_bound_to_none(ranks: int) -> None:
    threads = cores.among(cores.cores(), [cores.cores()] * ranks, cores.limit())
    allowed = subprocess.run(_SAY, capture_output=True, text=True, env=environ(), check=True).stdout.split()[1]
    assert _dearrun("-np", str(ranks), *_SAY).splitlines() == [f"{threads} {allowed}"] * ranks


def test_the_cores_are_those_that_dearrun_may_use() -> None:
    cpu = max(os.sched_getaffinity(0))
    command = ["taskset", "-c", str(cpu), sys.executable, "-m", "dearrun", "--no-tag-output", "-np", "1", *_SAY]
    said = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environ(), check=True)
    assert said.stdout == f"1 {cpu}\n"


def test_whoever_says_how_many_threads_is_heard() -> None:
    assert _dearrun("-np", "1", *_SAY, OMP_NUM_THREADS="7").startswith("7 ")
    assert _dearrun("-np", "1", "-x", "OMP_NUM_THREADS=5", *_SAY).startswith("5 ")
    # Ranks that mpirun has bound have cores of their own: init() looks at all of them.
    assert _dearrun("-np", "2", "--mpi-args", "--bind-to core", *_SAY).count("none ") == min(
        2, len(cores.cores()) // 2 * 2
    )


def test_torch_takes_as_many_threads() -> None:
    """Of a process that does not call init(), too."""
    threads = cores.among(cores.cores(), [cores.cores()], cores.limit())
    assert _dearrun("-np", "1", sys.executable, "-c", "import torch; print(torch.get_num_threads())") == f"{threads}\n"


# Rank 0 waits in the middle of its bar until that was seen.
_BAR = """
import os, pathlib, sys, time
from tqdm import tqdm
folder = pathlib.Path(sys.argv[1])
if os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")) == "0":
    print("on a terminal:", sys.stdout.isatty(), sys.stderr.isatty(), flush=True)
    for number in tqdm(range(2), mininterval=0, miniters=1):
        while number and not (folder / "seen").exists():
            time.sleep(0.01)
else:
    while not (folder / "seen").exists():
        time.sleep(0.01)
    sys.exit("what went wrong")
"""


class _Terminal:
    """What a terminal of 77 columns is sent by a command, in pieces."""

    def __init__(self, command: list[str]) -> None:
        self._screen, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, _COLUMNS, 0, 0))
        self._process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environ(TERM="xterm"))
        os.close(slave)
        self.sent = ""

    def until(self, pattern: str) -> str:
        deadline = time.monotonic() + 60
        while not re.search(pattern, self.sent):
            assert time.monotonic() < deadline, self.sent
            assert self._read(), self.sent
        return self.sent

    def end(self) -> int:
        while self._read():
            pass
        os.close(self._screen)
        return self._process.wait(60)

    def _read(self) -> bool:
        try:
            piece = os.read(self._screen, 1 << 16)
        except OSError:
            return False
        self.sent += piece.decode()
        return bool(piece)


def test_a_progress_bar_of_rank_0_is_shown_as_it_grows_and_others_are_tagged(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dearrun", "-np", "2", sys.executable, "-c", _BAR, str(tmp_path)]
    terminal = _Terminal(command)
    terminal.until(r"\r 50%\|")
    (tmp_path / "seen").touch()
    terminal.until("what went wrong")
    assert terminal.end() == 1
    lines = terminal.sent.split("\n")
    assert "on a terminal: True True\r" in lines
    bars = [bar for line in lines for bar in line.split("\r") if re.match(r" {0,2}\d+%\|", bar)]
    assert {len(bar) for bar in bars} == {_COLUMNS - 1}  # tqdm leaves one free, as in one process
    assert re.search(r"\r\x1b\[K\[[^]]*\b1\]\S* ?what went wrong\r\n", terminal.sent)  # where the bar was


@pytest.mark.parametrize(("rank", "place", "expected"), [("0", "here", True), ("1", "here", False), ("0", "", False)])
def test_only_a_rank_0_beside_dearrun_writes_where_dearrun_does(
    rank: str, place: str, expected: bool, tmp_path: Path
) -> None:
    """On another host, or in another container, the same name is another file."""
    here = subprocess.run(["sh", "-c", worker.HERE], capture_output=True, text=True, check=True).stdout.strip()
    out = tmp_path / "terminal"
    out.touch()
    streams = worker.Streams(here if place else f"{here}, another one", str(out), "")
    command = worker.starting(["echo", "a line"], "T", streams)
    said = subprocess.run(command, capture_output=True, text=True, env=environ(PMI_RANK=rank), timeout=300, check=True)
    assert (out.read_text(), said.stdout) == (("a line\n", "") if expected else ("", "a line\n"))


def test_a_pipe_gets_rank_0_as_it_is_only_if_asked_to() -> None:
    def lines(*options: str) -> list[str]:
        command = [sys.executable, "-m", "dearrun", "-np", "2", *options, "sh", "-c", "echo out; echo err >&2"]
        said = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environ(), check=True)
        return [*said.stdout.splitlines(), *said.stderr.splitlines()]

    assert sorted(line in ("out", "err") for line in lines()) == [False] * 4
    assert sorted(line in ("out", "err") for line in lines("--tag-output", "others")) == [False, False, True, True]
    assert set(lines("--no-tag-output")) == {"out", "err"}


def test_a_terminal_gets_every_rank_tagged_if_asked_to() -> None:
    command = [sys.executable, "-m", "dearrun", "-np", "1", "--tag-output", "all", "echo", "here"]
    terminal = _Terminal(command)
    assert terminal.end() == 0
    assert re.search(r"\[[^]]*\b0\]\S* ?here", terminal.sent)
