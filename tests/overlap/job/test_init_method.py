"""Processes that no launcher knows meet where the script says, as by torch.distributed's ``init_process_group()``."""

from __future__ import annotations

from pathlib import Path

import pytest

from dearrun.meeting import Meeting
from overlap.job.launch import InitMethod, Launch, Launcher, LaunchError, by_init_method
from tests.harness import run_script

URL = "tcp://10.0.0.1:29500"
TORCHRUN = Launch(Launcher.TORCHRUN, 1, 4, 0, 2, source="started by torchrun")

TRAINS = """
import sys
import torch
import torch.multiprocessing as mp

def work(rank, size, url):
    import dear
    for _ in range(2):
        dear.init(init_method=url, rank=rank, world_size=size)
        assert (dear.rank(), dear.size(), dear.mpi_enabled()) == (rank, size, False)
        assert torch.distributed.is_initialized()
        torch.manual_seed(rank)
        model = torch.nn.Linear(4, 2)
        optimizer = dear.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(3, 4) * rank).sum().backward()
            optimizer.step()
        everybodys = dear.allgather(model.weight.detach()[None])
        assert all(torch.equal(one, everybodys[0]) for one in everybodys)
        dear.shutdown()
        assert not torch.distributed.is_initialized()
        if not url.startswith("tcp"):
            break
    print("the end", flush=True)

if __name__ == "__main__":
    mp.spawn(work, args=(2, sys.argv[1]), nprocs=2)
"""


@pytest.mark.parametrize("way", ["tcp", "file"])
def test_processes_that_no_launcher_knows_train_together(way: str, tmp_path: Path) -> None:
    meeting = Meeting([], "here")  # its port is kept free until the test is over
    url = f"tcp://127.0.0.1:{meeting.port}" if way == "tcp" else f"file://{tmp_path}/meet"
    assert run_script(tmp_path, TRAINS, 1, "single", url).check().output.count("the end") == 2


def test_who_a_process_is() -> None:
    alone = by_init_method(Launch(Launcher.SINGLE), InitMethod(URL, 1, 2))
    assert (alone.launcher, alone.rank, alone.size, alone.init_method) == (Launcher.TORCHRUN, 1, 2, URL)
    assert by_init_method(TORCHRUN, InitMethod(URL)).rank == 1
    assert by_init_method(TORCHRUN, InitMethod(URL, 1, 4)).local_rank == 0


@pytest.mark.parametrize(
    ("launch", "wanted", "message"),
    [
        (Launch(Launcher.SINGLE), InitMethod(URL), "needs rank= and world_size="),
        (Launch(Launcher.SINGLE), InitMethod(URL, 2, 2), "from 0 to world_size - 1 = 1 and is 2"),
        (TORCHRUN, InitMethod(URL, 0, 4), "makes this process rank 1 of 4, and init.. rank 0 of 4"),
        (Launch(Launcher.MPI, 0, 2, source="started by Open MPI"), InitMethod(URL), "leave init_method out"),
    ],
)
def test_what_cannot_be(launch: Launch, wanted: InitMethod, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        by_init_method(launch, wanted)
