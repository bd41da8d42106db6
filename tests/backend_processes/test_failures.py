"""A job over the backend that goes wrong says who, in what, and in which group, and comes to an end."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from tests.harness import Result, run_script

IMPORTS = """
import os, signal, sys, time, torch, torch.distributed as dist
from datetime import timedelta
import dear.backend
dist.init_process_group("dear", timeout=timedelta(seconds=60))
RANK, LAST = dist.get_rank(), dist.get_world_size() - 1
dist.barrier()
"""
LOOP = """
for number in range(100000):
    dist.all_reduce(torch.ones(1000))
    if RANK == LAST and number == 20:
        {how}
"""


def _run(folder: Path, text: str, ranks: int = 2, launcher: str = "torchrun", **env: str) -> Result:
    return run_script(folder, IMPORTS + text, ranks, launcher, timeout=60, **env)


@pytest.mark.parametrize(
    "how", [pytest.param("os._exit(3)", marks=pytest.mark.full), "os.kill(os.getpid(), signal.SIGKILL)"]
)
def test_a_rank_that_dies_is_named_by_the_others(how: str, tmp_path: Path) -> None:
    """Before the launcher ends them: they catch the error, and say what it says."""
    text = f"""
signal.signal(signal.SIGTERM, signal.SIG_IGN)
begun = time.monotonic()
try:
{re.sub("^", "    ", LOOP.format(how=how), flags=re.MULTILINE)}
except RuntimeError as error:
    print(f"rank {{RANK}} was told after {{time.monotonic() - begun:.0f}} s: {{error}}", flush=True)
    os._exit(1)
"""
    result = _run(tmp_path, text, 3)
    assert not result.timed_out
    assert result.returncode != 0
    told = re.findall(r"rank ([01]) was told after (\d+) s: ((?s:.*?))(?=^rank \d was told|\Z)", result.output, re.M)
    assert told, result.output
    assert all(int(seconds) < 30 for _, seconds, _ in told)
    assert any(re.search(r"rank 2\b", said) for _, _, said in told), result.output


def test_a_rank_that_left_is_named(tmp_path: Path) -> None:
    text = """
if RANK == LAST:
    dist.destroy_process_group()
    sys.exit(0)
begun = time.monotonic()
try:
    dist.all_reduce(torch.ones(4))
except RuntimeError as error:
    print(f"after {time.monotonic() - begun:.0f} s: {error}", flush=True)
    os._exit(1)
"""
    result = _run(tmp_path, text)
    assert result.returncode != 0
    found = re.search(r"^after (\d+) s: (.*rank 1\b.*)", result.output, re.M)
    assert found, result.output
    assert int(found[1]) < 30


def test_a_stall_is_told_by_operation_rank_and_group(tmp_path: Path) -> None:
    text = """
group = dist.new_group(group_desc="pairs")
if RANK == LAST:
    time.sleep(6)
dist.all_reduce(torch.ones(4), group=group)
print("done", flush=True)
dist.destroy_process_group()
"""
    result = _run(tmp_path, text, DEAR_STALL_WARN_SECONDS="2").check()
    said = next((line for line in result.output.splitlines() if "waited" in line), "")
    assert re.search("all.?reduce", said), result.output
    assert re.search(r"rank\(?s?\)? \[?1\b", result.output), result.output
    assert "pairs" in result.output, result.output


def test_the_watchdog_ends_what_hangs(tmp_path: Path) -> None:
    text = """
groups = dist.new_group(), dist.new_group()
dist.all_reduce(torch.ones(4), group=groups[RANK == LAST])
"""
    begun = time.monotonic()
    result = _run(tmp_path, text, DEAR_STALL_WARN_SECONDS="1", DEAR_STALL_ABORT_SECONDS="4")
    assert not result.timed_out
    assert result.returncode != 0
    assert time.monotonic() - begun < 45


def test_the_limit_of_the_default_group_ends_its_first_collective(tmp_path: Path) -> None:
    text = """
dist.destroy_process_group()
dist.init_process_group("dear", timeout=timedelta(seconds=2))
if RANK == LAST:
    time.sleep(12)
    os._exit(0)
begun = time.monotonic()
try:
    dist.all_reduce(torch.ones(4))
except RuntimeError as error:
    print(f"after {time.monotonic() - begun:.0f} s: {error}", flush=True)
    os._exit(1)
"""
    result = _run(tmp_path, text)
    found = re.search(r"^after (\d+) s: (.*)", result.output, re.M)
    assert found, result.output
    assert int(found[1]) < 10


def test_an_error_in_the_script_of_one_rank_ends_the_job(tmp_path: Path) -> None:
    text = """
if RANK == LAST:
    raise ValueError("the one cause")
for number in range(100000):
    dist.all_reduce(torch.ones(1000))
"""
    result = _run(tmp_path, text)
    assert not result.timed_out
    assert result.returncode != 0
    assert "ValueError: the one cause" in result.output
