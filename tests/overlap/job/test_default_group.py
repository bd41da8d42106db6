"""Under MPI, what asks torch.distributed for its default group finds one of the same ranks, while the session lasts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import run_script

LIBRARIES = """
import os, threading, torch, dear
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from tests.threads import wait_for_no_thread_named

before = dict(os.environ)
dear.init()
rank, size = dear.rank(), dear.size()
told = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
assert told == [str(rank), "2", str(rank), "2"], told
assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (rank, size, "gloo")
assert dear.mpi_enabled() and os.environ["MASTER_ADDR"] == "127.0.0.1" and os.environ["GLOO_SOCKET_IFNAME"] == "lo"

for _ in range(3):  # one beside the other
    theirs, ours = torch.full((5,), rank + 1.0), torch.full((5,), rank + 1.0)
    work = dist.all_reduce(theirs, async_op=True)
    handle = dear.allreduce_async(ours, op=dear.Sum)
    work.wait()
    assert theirs.tolist() == dear.synchronize(handle).tolist() == [3.0] * 5
    del work  # which keeps the group

import torchmetrics
metric = torchmetrics.MeanMetric()
metric.update(torch.tensor(float(rank)))
assert metric.compute() == 0.5

mine = torch.full((3,), float(rank))
checkpoint.save({"shared": torch.ones(2), f"of {rank}": mine}, checkpoint_id="saved")
found = {"shared": torch.zeros(2), f"of {rank}": torch.zeros(3)}
checkpoint.load(found, checkpoint_id="saved")
assert torch.equal(found["shared"], torch.ones(2)) and torch.equal(found[f"of {rank}"], mine)

import transformers
arguments = transformers.TrainingArguments("out", use_cpu=True, report_to="none")
assert (arguments.world_size, arguments.process_index) == (2, rank), (arguments.world_size, arguments.process_index)

import accelerate
accelerator = accelerate.Accelerator(cpu=True)
assert (accelerator.num_processes, accelerator.process_index) == (2, rank)
assert accelerator.gather(torch.tensor([rank])).tolist() == [0, 1]

if rank == 0:
    dist.all_reduce(torch.ones(1), async_op=True)  # the other rank never comes to it
dear.shutdown()
assert not dist.is_initialized()
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME")
assert [os.environ.get(name) for name in names] == [before.get(name) for name in names]
wait_for_no_thread_named("gloo")
print("the end", flush=True)
"""


def test_libraries_find_the_ranks_of_the_job(tmp_path: Path) -> None:
    result = run_script(tmp_path, LIBRARIES, timeout=400).check()
    assert result.output.count("the end") == 2
    assert "Error" not in result.output


OF_A_PART = """
import os, torch, dear
import torch.distributed as dist
from mpi4py import MPI

def total():
    found = torch.ones(1)
    dist.all_reduce(found)
    return found.item()

world = MPI.COMM_WORLD
part = world.Split(world.rank // 2, -world.rank)  # ranks 1 and 0, in this order; and rank 2 alone
dear.init(comm=part)
assert (dear.rank(), dear.size()) == (part.rank, part.size)
if part.size == 1:
    assert not dist.is_initialized() and "RANK" not in os.environ
else:
    assert (dist.get_rank(), total(), os.environ["RANK"], os.environ["WORLD_SIZE"]) == (part.rank, 2, str(part.rank), "2")
    try:
        dist.init_process_group("gloo")
        raise AssertionError
    except ValueError as error:
        assert "twice" in str(error)
    dist.destroy_process_group()
    part.Barrier()  # rank 0's store is gone
    dist.init_process_group("gloo")  # the script's own, by the variables that it finds: their port is free again
dear.shutdown()
if part.size == 2:
    assert total() == 2, "the script's own group is left alone"
    dist.destroy_process_group()
assert "RANK" not in os.environ
print("the end", flush=True)
"""


def test_a_part_of_the_ranks_has_a_group_of_its_own_until_the_script_makes_one(tmp_path: Path) -> None:
    result = run_script(tmp_path, OF_A_PART, ranks=3, real_start=True).check()
    assert result.output.count("the end") == 3


FAILS = """
import os, sys, torch
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    os.environ["GLOO_SOCKET_IFNAME"] = "nonesuch0"
import dear
import torch.distributed as dist
dear.init()
assert not dist.is_initialized() and "RANK" not in os.environ and "MASTER_PORT" not in os.environ
assert dear.allreduce(torch.ones(1), op=dear.Sum) == 2
print("the end", flush=True)
"""


def test_a_rank_that_cannot_make_it_stops_nobody(tmp_path: Path) -> None:
    result = run_script(tmp_path, FAILS).check()
    assert result.output.count("the end") == 2
    assert result.output.count("torch.distributed stays uninitialised") == 1, result.output
    assert "rank 1 of 2: RuntimeError" in result.output
    assert "nonesuch0" in result.output
    assert "init(torch_distributed=False) does not try" in result.output


LEFT_WAITING = """
import os, sys, warnings, torch, dear
import torch.distributed as dist
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)  # of fork() in Python 3.12
dear.init()
peer = 1 - dear.rank()
work = dist.broadcast(torch.ones(1000), src=peer, async_op=True)  # each waits for the other, for ever
child = os.fork()
if child == 0:
    sys.exit()  # a process that ends as Python does, and is no rank
assert os.waitpid(child, 0)[1] == 0
print("the end", flush=True)
"""


@pytest.mark.full
def test_it_ends_with_the_interpreter_whatever_is_left_waiting(tmp_path: Path) -> None:
    result = run_script(tmp_path, LEFT_WAITING, real_start=True).check()
    assert result.output.count("the end") == 2
    assert "terminate" not in result.output
    assert "Warning" not in result.output
