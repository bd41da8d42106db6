"""The harness itself: it fails when it should, shows why, and leaves nothing behind."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest

from tests.harness import ROOT, JobFailed, run_ranks, run_suite

FAIL_ON_1 = """
import os, sys, time
if os.environ["RANK"] == "1":
    sys.exit("rank 1 of 2 failed: because of a test")
time.sleep(600)
"""


def _script(folder: Path, text: str) -> list[str]:
    path = folder / "script.py"
    path.write_text(text)
    return [str(path)]


def test_a_failing_rank_fails_the_job_with_its_own_message(tmp_path: Path) -> None:
    result = run_ranks(2, _script(tmp_path, FAIL_ON_1), "torchrun", timeout=60)
    with pytest.raises(JobFailed, match="because of a test"):
        result.check()
    assert not result.timed_out


def test_a_hanging_job_ends_in_time_and_shows_where(tmp_path: Path) -> None:
    result = run_ranks(1, _script(tmp_path, "import time\ntime.sleep(600)\n"), "single", timeout=3)
    assert result.timed_out
    assert "script.py" in result.output
    with pytest.raises(JobFailed, match="did not end"):
        result.check()


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


@pytest.mark.parametrize("launcher", ["mpi", "torchrun"])
def test_a_test_that_hangs_shows_where_each_rank_is(tmp_path: Path, launcher: str) -> None:
    (tmp_path / "conftest.py").write_text("import dear\ndear.init()\n")
    (tmp_path / "test_late.py").write_text(SLOW_ON_1)
    argv = ["-m", "pytest", "-q", "-x", "-p", "tests.spmd_plugin", "--timeout", "3", str(tmp_path / "test_late.py")]
    result = run_ranks(2, argv, launcher, timeout=90, env={"PYTHONPATH": str(ROOT)}, cwd=tmp_path)
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


@pytest.mark.parametrize("last_red", ["d", "f"], ids=["in-the-middle", "at-the-end"])
def test_a_red_test_costs_that_test_and_none_behind_it(tmp_path: Path, last_red: str) -> None:
    (tmp_path / "conftest.py").write_text("import dear\ndear.init()\n")
    (tmp_path / "test_cases.py").write_text(TWO_RED.replace("LAST_RED", repr(last_red)))
    argv = ["-m", "pytest", "-v", "-p", "tests.spmd_plugin", "-p", "no:cacheprovider", "--color", "no", "test_cases.py"]
    results = run_suite(2, argv, "mpi", timeout=90, env={"PYTHONPATH": str(ROOT)}, cwd=tmp_path)
    assert [result.failed_test() for result in results] == [
        f"test_cases.py::test_cases[{c}]" for c in ("b c", last_red)
    ] + [None]
    results[-1].check()
    passed = re.findall(r"test_cases\[(.+)\] PASSED", "".join(result.output for result in results))
    assert [case for case in passed if case != "b c"] == [case for case in ("a", "d", "e", "f") if case != last_red]
    for result in results[:-1]:
        with pytest.raises(JobFailed, match=r"on one rank alone|on all ranks"):
            result.check()


def test_the_compiler_comes_when_it_is_asked_for(tmp_path: Path) -> None:
    """Optimizers import it; at_start/sitecustomize.py puts that off."""
    text = """
import sys
import torch

def compiler_is_there():
    return "torch._dynamo.convert_frame" in sys.modules

assert not compiler_is_there()
weight = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([weight], lr=1.0)

def step(compile=lambda loss: loss):
    optimizer.zero_grad()
    compile(lambda: weight.square().sum())().backward()
    optimizer.step()

step()
assert not compiler_is_there()
step(lambda loss: torch.compile(loss, backend="eager", fullgraph=True))
assert compiler_is_there()
assert "at_start" not in torch._dynamo.disable.__code__.co_filename
step()
assert weight.tolist() == [-1.0, -1.0]
optimizer.add_param_group({"params": torch.nn.Parameter(torch.ones(1))})
"""
    run_ranks(1, _script(tmp_path, text), "single", timeout=60).check()


def test_a_rank_that_fails_under_mpirun_ends_its_peers(tmp_path: Path) -> None:
    text = FAIL_ON_1.replace('"RANK"', '"OMPI_COMM_WORLD_RANK"')
    result = run_ranks(2, _script(tmp_path, text), "mpi", timeout=60)
    with pytest.raises(JobFailed, match="because of a test"):
        result.check()
    assert not result.timed_out


def test_children_that_outlive_their_job_are_ended(tmp_path: Path) -> None:
    text = f"""
import subprocess
child = subprocess.Popen([{sys.executable!r}, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("child", child.pid, flush=True)
"""
    result = run_ranks(1, _script(tmp_path, text), "single", timeout=30).check()
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
