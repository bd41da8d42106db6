"""Processes that a script starts by itself, as PyTorch's tutorials do: the world they have initialised is ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dearrun.meeting import Meeting
from overlap.job.launch import Launch, Launcher, LaunchError, adopted
from tests.harness import ROOT, run_script

SPAWNED = """
import sys, torch, dear
import torch.multiprocessing as mp

def work(rank, size, port, way):
    torch.distributed.init_process_group("gloo", rank=rank, world_size=size, init_method=f"tcp://127.0.0.1:{port}")
    groups = [torch.distributed.new_group([0, 1]), torch.distributed.new_group([2, 3])] if way == "subgroup" else None
    dear.init(comm=None if groups is None else groups[rank // 2])
    expected = 2 if groups else size
    assert dear.size() == expected, dear.size()
    assert dear.rank() == rank % expected
    torch.manual_seed(rank)
    model = torch.nn.Linear(4, 2)
    optimizer = dear.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(3, 4) * rank).sum().backward()
        optimizer.step()
    optimizer.synchronize()
    everybodys = dear.allgather(model.weight.detach()[None])
    assert len(everybodys) == expected
    assert all(torch.equal(one, everybodys[0]) for one in everybodys)
    total = dear.allreduce(torch.tensor([float(rank)]), op=dear.Sum).item()
    assert total == (1 + 4 * (rank // 2) if groups else sum(range(size))), total
    dear.shutdown()
    found = torch.ones(1)
    torch.distributed.all_reduce(found)  # the script's own world is left alone
    assert found == size
    torch.distributed.destroy_process_group()
    print("the end", flush=True)

if __name__ == "__main__":
    size = 4 if sys.argv[2] == "subgroup" else 2
    mp.spawn(work, args=(size, int(sys.argv[1]), sys.argv[2]), nprocs=size)
"""


@pytest.fixture
def meeting() -> Meeting:
    """Its port is kept free until the test is over: rank 0 listens there."""
    return Meeting([], "here")


@pytest.mark.parametrize("way", ["world", "subgroup"])
def test_spawned_processes_train_together(way: str, meeting: Meeting, tmp_path: Path) -> None:
    result = run_script(tmp_path, SPAWNED, 1, "single", str(meeting.port), way).check()
    assert result.output.count("the end") == (4 if way == "subgroup" else 2)


ONE_AFTER_ANOTHER = """
import torch, dear
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
groups = [torch.distributed.new_group([other]) for other in range(2)]
for _ in range(1 + rank):  # not as often as the other one
    dear.init(groups[rank])
    assert dear.size() == 1
    dear.shutdown()
for _ in range(2):
    dear.init()
    assert (dear.rank(), dear.size()) == (rank, 2)
    assert dear.allreduce(torch.tensor([1.0]), op=dear.Sum).item() == 2
    dear.shutdown()
print("the end", flush=True)
"""


def test_all_ranks_meet_after_some_had_sessions_of_their_own(tmp_path: Path) -> None:
    result = run_script(tmp_path, ONE_AFTER_ANOTHER, 2, "torchrun", timeout=400).check()
    assert result.output.count("the end") == 2


UNDER_MPI = """
import os, sys, torch, dear
rank, meeting = int(os.environ["OMPI_COMM_WORLD_RANK"]), f"tcp://127.0.0.1:{sys.argv[1]}"
torch.distributed.init_process_group("gloo", rank=rank, world_size=2, init_method=meeting)
dear.init()
assert dear.mpi_enabled() and "RANK" not in os.environ
assert dear.allreduce(torch.ones(1), op=dear.Sum) == 2
dear.shutdown()
found = torch.ones(1)
torch.distributed.all_reduce(found)
assert found == 2
torch.distributed.destroy_process_group()
print("the end", flush=True)
"""


def test_under_mpi_the_scripts_world_is_left_alone_and_messages_go_over_mpi(meeting: Meeting, tmp_path: Path) -> None:
    result = run_script(tmp_path, UNDER_MPI, 2, "mpi", str(meeting.port), timeout=400).check()
    assert result.output.count("the end") == 2


DISAGREES = """
import torch, dear
torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
dear.init()
"""


def test_a_launcher_that_disagrees_is_named(tmp_path: Path) -> None:
    result = run_script(tmp_path, DISAGREES, timeout=400)
    assert result.returncode != 0
    assert "rank 0 of 2, and the script has initialised torch.distributed as rank 0 of 1" in result.output


@pytest.mark.parametrize(
    ("launch", "expected"),
    [
        (Launch(Launcher.SINGLE), (Launcher.TORCHRUN, 1, 3)),
        (Launch(Launcher.SINGLE, source="DEAR_BACKEND=single"), (Launcher.SINGLE, 0, 1)),
        (Launch(Launcher.MPI, 1, 3), (Launcher.MPI, 1, 3)),
        (Launch(Launcher.TORCHRUN, 1, 3), (Launcher.TORCHRUN, 1, 3)),
    ],
)
def test_adopted(launch: Launch, expected: tuple[Launcher, int, int]) -> None:
    found = adopted(launch, 1, 3)
    assert (found.launcher, found.rank, found.size) == expected


@pytest.mark.parametrize("launch", [Launch(Launcher.MPI, 0, 3), Launch(Launcher.TORCHRUN, 1, 2)])
def test_two_stories_are_refused(launch: Launch) -> None:
    with pytest.raises(LaunchError, match="leave it out"):
        adopted(launch, 1, 3)


def test_one_process_without_any_of_it_is_alone() -> None:
    script = "import dear; dear.init(); assert dear.size() == 1; dear.shutdown()"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60, cwd=ROOT)
