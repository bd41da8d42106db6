"""One line changed: scripts of stock torch.distributed start under every launcher, alone, and more than once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import run_script

LAUNCHERS = ("torchrun", "mpi", "dearrun", "restarts")
SCRIPT = """
import torch, torch.distributed as dist
import dear.backend
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("dear")
model = DistributedDataParallel(torch.nn.Linear(4, 4))
model(torch.ones(2, 4)).sum().backward()
total = torch.ones(3)
dist.all_reduce(total)
if dist.get_rank() == 0:
    print("total", int(total[0]), "of", dist.get_world_size(), "over", dist.get_backend(), flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_script_with_one_line_changed(launcher: str, tmp_path: Path) -> None:
    result = run_script(tmp_path, SCRIPT, 2, launcher).check()
    assert "total 2 of 2 over dear" in result.output
    assert "Warning" not in result.output


@pytest.mark.full
def test_a_process_that_starts_and_ends_as_a_users_does(tmp_path: Path) -> None:
    result = run_script(tmp_path, SCRIPT, 2, "torchrun", real_start=True).check()
    assert "total 2 of 2 over dear" in result.output


def test_a_script_that_leaves_its_group_open_ends(tmp_path: Path) -> None:
    text = SCRIPT.replace("dist.destroy_process_group()", "")
    result = run_script(tmp_path, text, 2, "torchrun", timeout=60).check()
    assert "total 2 of 2 over dear" in result.output


@pytest.mark.full
def test_torchs_own_checks_of_collectives_go_on_top(tmp_path: Path) -> None:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL, with which torch wraps a backend."""
    result = run_script(tmp_path, SCRIPT, 2, "torchrun", TORCH_DISTRIBUTED_DEBUG="DETAIL").check()
    assert "total 2 of 2 over dear" in result.output


def test_beside_a_session_of_ours(tmp_path: Path) -> None:
    """``dear.init()`` and the backend in one job, in either order, each with communicators of its own."""
    text = """
import sys, torch, torch.distributed as dist
import dear, dear.backend
if sys.argv[1] == "session":  # which makes the default group
    dear.init()
    group = dist.new_group(backend="dear")
else:
    dist.init_process_group("dear")
    dear.init()
    group = dist.group.WORLD
for number in range(20):
    mine = torch.full((100,), float(number))
    work = dist.all_reduce(mine, group=group, async_op=True)
    theirs = dear.allreduce(torch.full((100,), 1.0), op=dear.Sum)
    work.wait()
    assert mine[0] == 2 * number and theirs[0] == 2
if dist.get_rank() == 0:
    print("both are done", flush=True)
dear.shutdown()
if dist.is_initialized():
    dist.destroy_process_group()
"""
    for order in ("session", "group"):
        result = run_script(tmp_path, text, 2, "torchrun", order).check()
        assert "both are done" in result.output
