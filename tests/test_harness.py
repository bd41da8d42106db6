"""The harness itself: it fails when it should, shows why, and leaves nothing behind."""

from __future__ import annotations

import re
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests import harness, notes
from tests.harness import JobFailed, Result, run_ranks, run_script, run_suite

FAIL_ON_1 = """
import os, sys, time
if os.environ["RANK"] == "1":
    sys.exit("rank 1 of 2 failed: because of a test")
time.sleep(600)
"""


def test_a_failing_rank_fails_the_job_with_its_own_message(tmp_path: Path) -> None:
    result = run_script(tmp_path, FAIL_ON_1, 2, "torchrun", timeout=400)
    with pytest.raises(JobFailed, match="because of a test"):
        result.check()
    assert not result.timed_out


def test_a_hanging_job_ends_in_time_and_shows_where(tmp_path: Path) -> None:
    result = run_script(tmp_path, "import time\ntime.sleep(600)\n", 1, "single", timeout=3, real_start=True)
    assert result.timed_out
    assert "script.py" in result.output
    with pytest.raises(JobFailed, match="did not end"):
        result.check()


def test_what_a_rank_said_is_not_lost_among_stacks_of_threads() -> None:
    thread = 'Thread 0x00007f29{:08x} (most recent call first):\n  File "/a/b.py", line {} in wait\n\n'
    stacks = "".join(thread.format(number, 7) for number in range(1000)) + thread.format(1000, 8)
    current = 'Current thread 0x00007f29e8e08b80 (most recent call first):\n  File "/a/b.py", line 7 in wait\n'
    shown = Result("", 1, f"rank(s) [1] will not come\n{stacks}{current}", 1.0, False).first_failure()
    assert shown == f"rank(s) [1] will not come\n{thread.format(0, 7)}{thread.format(1000, 8)}{current}"


SLOW_ON_1 = """
import time
import dear

def waits_for_the_other():
    dear.barrier()

def test_one_rank_is_late():
    if dear.rank() == 1:
        time.sleep(600)
    waits_for_the_other()
"""


@pytest.mark.full
@pytest.mark.parametrize("launcher", ["mpi", "torchrun"])
def test_a_test_that_hangs_shows_where_each_rank_is(tmp_path: Path, launcher: str) -> None:
    (tmp_path / "conftest.py").write_text("import dear\ndear.init()\n")
    (tmp_path / "test_late.py").write_text(SLOW_ON_1)
    argv = ["-m", "pytest", "-q", "-x", "-p", "tests.spmd_plugin", "--timeout", "3", str(tmp_path / "test_late.py")]
    result = run_ranks(2, argv, launcher, timeout=400, cwd=tmp_path)
    assert not result.timed_out
    shown = result.first_failure()
    assert "test_one_rank_is_late is not over after 3 s" in shown
    assert "in waits_for_the_other" in shown
    assert "line 10, in test_one_rank_is_late" in shown
    assert "/pluggy/" not in shown


TWO_RED = """
import dear
import pytest

@pytest.mark.parametrize("case", ["a", "b c", "d", "e", "f"])
def test_cases(case):
    dear.barrier()
    assert not (case == "b c" and dear.rank() == 1), "on one rank alone"
    assert case != LAST_RED, "on all ranks"
"""


@pytest.mark.full
@pytest.mark.parametrize("last_red", ["d", "f"], ids=["in-the-middle", "at-the-end"])
def test_a_red_test_costs_that_test_and_none_behind_it(tmp_path: Path, last_red: str) -> None:
    results = _suite(tmp_path, TWO_RED.replace("LAST_RED", repr(last_red)))
    assert [result.failed_test() for result in results] == [
        f"test_cases.py::test_cases[{c}]" for c in ("b c", last_red)
    ] + [None]
    results[-1].check()
    passed = re.findall(r"test_cases\[(.+)\] PASSED", "".join(result.output for result in results))
    assert [case for case in passed if case != "b c"] == [case for case in ("a", "d", "e", "f") if case != last_red]
    for result in results[:-1]:
        with pytest.raises(JobFailed, match=r"on one rank alone|on all ranks"):
            result.check()


def _suite(folder: Path, text: str, *options: str, launcher: str = "mpi") -> list[Result]:
    (folder / "conftest.py").write_text("import dear\ndear.init()\n")
    (folder / "test_cases.py").write_text(text)
    argv = ["-m", "pytest", "-v", "-p", "tests.spmd_plugin", "-p", "no:cacheprovider", "--color", "no", *options]
    return run_suite(2, [*argv, "test_cases.py"], launcher, timeout=180, cwd=folder)


WITHOUT_A_WORD = """
import ctypes, os, signal
import dear
import pytest

@pytest.mark.parametrize("case", ["a", "b", "c"])
def test_cases(case):
    dear.barrier()
    if case == "b" and dear.rank() in RANKS:
        END
"""
KILLED = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.full
@pytest.mark.parametrize(
    ("launcher", "ranks", "end"),
    [
        ("mpi", [1], KILLED),
        ("mpi", [0, 1], KILLED),
        ("mpi", [1], "os.abort()"),
        ("mpi", [1], "os._exit(0)"),
        ("torchrun", [1], KILLED),
    ],
)
def test_a_test_in_which_a_rank_dies_costs_that_test_and_none_behind_it(
    tmp_path: Path, launcher: str, ranks: list[int], end: str
) -> None:
    results = _suite(tmp_path, WITHOUT_A_WORD.replace("RANKS", str(ranks)).replace("END", end), launcher=launcher)
    _only_b_is_red(results)


@pytest.mark.full
def test_a_test_that_keeps_python_from_telling_the_time_costs_that_test_and_none_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rank's timer is a thread, and waits for a call that does not give up the interpreter."""
    monkeypatch.setattr(harness, "_PATIENCE_SECONDS", 2.0)
    text = WITHOUT_A_WORD.replace("RANKS", "[0, 1]").replace("END", "ctypes.PyDLL(None).sleep(600)")
    _only_b_is_red(_suite(tmp_path, text, "--timeout", "10"))


def _only_b_is_red(results: list[Result]) -> None:
    assert [result.failed_test() for result in results] == ["test_cases.py::test_cases[b]", None]
    with pytest.raises(JobFailed, match=r"(exited with|did not end within) .* in test_cases\.py::test_cases\[b\]\n"):
        results[0].check()
    results[1].check()
    assert "test_cases[a] PASSED" in results[0].output
    assert "test_cases[c] PASSED" in results[1].output


def test_the_test_in_which_a_rank_died_is_the_red_one_whatever_others_say_who_missed_it() -> None:
    said = Result("", 1, "rank 0 of 2 failed: test.py::c (call)\nConnection lost\n", 1.0, False, ended_in="test.py::a")
    assert said.failed_test() == "test.py::c"
    died = replace(said, killed_in="test.py::b")
    assert died.failed_test() == "test.py::b"
    with pytest.raises(JobFailed, match=r"exited with 1 in test.py::b\nrank 0 of 2 failed: test.py::c"):
        died.check()


def test_what_notes_of_ranks_say(tmp_path: Path) -> None:
    assert (notes.read(tmp_path), notes.first([]), notes.killed([], "")) == ([], "", "")
    for rank, number in enumerate((3, 1, 2)):
        notes.write(str(tmp_path), rank, 0, 0.0, "before")
        notes.write(str(tmp_path), rank, number, 60.0, f"test.py::of[{number} or so]")
    found = sorted(notes.read(tmp_path), key=lambda note: note.number)
    assert [note.test for note in found] == [f"test.py::of[{number} or so]" for number in (1, 2, 3)]
    assert notes.first(found) == "test.py::of[1 or so]"
    _, two, three = (notes.Note(note.number, 100 + note.number, 60.0, 1000.0, note.test) for note in found)
    said = "noticed that process rank 0 with PID 103 on node here exited on signal 9"
    assert notes.killed([two, three], said) == three.test
    assert notes.killed([two, three], "exitcode: -9 (pid: 102) of binary; exitcode: 1 (pid: 103)") == two.test
    assert notes.killed([two, three], "with PID 17") == ""
    assert [notes.overdue([two, three], now, patience=30.0) for now in (1089.0, 1091.0)] == [False, True]
    assert not notes.overdue([notes.Note(1, 1, 0.0, 0.0, "without a limit")], 1e9, patience=30.0)
    for rank in range(4):
        notes.erase(str(tmp_path), rank)
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_fails_under_mpirun_ends_its_peers(tmp_path: Path) -> None:
    text = FAIL_ON_1.replace('"RANK"', '"OMPI_COMM_WORLD_RANK"')
    result = run_script(tmp_path, text, timeout=400)
    with pytest.raises(JobFailed, match="because of a test"):
        result.check()
    assert not result.timed_out


def test_children_that_outlive_their_job_are_ended(tmp_path: Path) -> None:
    text = f"""
import subprocess
child = subprocess.Popen([{sys.executable!r}, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("child", child.pid, flush=True)
"""
    result = run_script(tmp_path, text, 1, "single", timeout=30).check()
    found = re.search(r"child (\d+)", result.output)
    assert found
    status = Path("/proc", found.group(1), "status")
    deadline = time.monotonic() + 10
    while status.exists() and "zombie" not in status.read_text():
        assert time.monotonic() < deadline, "the child still runs"
        time.sleep(0.05)


def test_an_unknown_launcher_is_named() -> None:
    with pytest.raises(ValueError, match="'slurm'"):
        run_ranks(1, ["-c", "pass"], "slurm")
