"""Sharded models where torch.distributed's default group has other ranks than the job, or numbers them in another way."""

from __future__ import annotations

from pathlib import Path

import pytest

from dearrun.meeting import Meeting
from tests.harness import run_script

COMMON = """
import copy, functools, sys, torch, dear, fsdp
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

def model_of(part):
    torch.default_generator.manual_seed(7 + part)
    layers = [torch.nn.Embedding(11, 6), torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)]
    return torch.nn.Sequential(*layers).double()

def loss_of(model, step, rank):
    tokens = torch.randint(11, (4,), generator=torch.Generator().manual_seed(10 * step + rank))
    return model(tokens).square().mean()

def optimizers_of(model):
    matrices = [each for each in model.parameters() if each.dim() > 1]
    others = [each for each in model.parameters() if each.dim() == 1]
    return [torch.optim.SGD(matrices, 0.1, momentum=0.9), torch.optim.AdamW(others, 0.01)]

def train(model, optimizers, steps, ranks):
    for step in steps:
        for rank in ranks:
            (loss_of(model, step, rank) / len(ranks)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for each in optimizers:
            each.step()
            each.zero_grad()

def alone(part, steps, ranks):
    model = model_of(part)
    train(model, optimizers_of(model), steps, ranks)
    return model.state_dict()

def same(found, expected):
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12)

def sharded(part, **options):
    model = model_of(part)
    for layer in model:
        fsdp.fully_shard(layer, **options)
    fsdp.fully_shard(model, **options)
    return model, optimizers_of(model)

def check(part, ranks, **options):
    # `ranks` of the job train the model of their `part`
    model, optimizers = sharded(part, **options)
    train(model, optimizers, range(3), [dear.rank()])
    expected = alone(part, range(3), ranks)
    same(model.state_dict(), expected)
    assert optimizers[0]._everyone.size == len(ranks)
    assert sorted(optimizers[0]._engine.participants.ranks) == ranks
    numel = sum(value.numel() for value in expected.values())
    held = sum(b.parameters.shard.numel() for each in optimizers for b in each.buckets)
    assert held < 0.75 * numel, (held, numel)
    with dear.whole(model):
        same({name: value.detach() for name, value in model.named_parameters()}, expected)
    return model, optimizers, expected

def check_rows(model, expected, ranks):
    # `ranks` of the default group
    found = dear.dtensor_state_dict(model)
    for name, value in found.items():
        assert value.device_mesh.mesh.tolist() == ranks, value.device_mesh
        same({name: value.full_tensor()}, {name: expected[name]})
    with torch.no_grad():
        for value in found.values():
            value.mul_(2.0)
    model.load_state_dict(found)
    same(model.state_dict(), {name: 2 * value for name, value in expected.items()})

def raises(kind, text, call, *args):
    try:
        call(*args)
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"{call} has not raised")
"""

# Ranks {0, 2} of the job are 0 and 1 of one default group, and ranks {1, 3} of another one.
APART = """
me = int(__import__("os").environ["OMPI_COMM_WORLD_RANK"])
part = me % 2
dear.init(torch_distributed=False)
dist.init_process_group("gloo", store=dist.FileStore(f"store{part}", 2), rank=me // 2, world_size=2)
assert (dear.rank(), dear.size(), dist.get_rank(), dist.get_world_size()) == (me, 4, me // 2, 2)
mesh = dist.init_device_mesh("cpu", (2,))
model, optimizers, expected = check(part, [part, part + 2], mesh=mesh)
check_rows(model, expected, [0, 1])

wrapped = model_of(part)
members = dear.Mesh(data=2, part=2).group("data")
optimizer = fsdp.DistributedOptimizer(torch.optim.SGD(wrapped.parameters(), 0.1), wrapped, process_set=members)
train(wrapped, [optimizer], range(2), [dear.rank()])
check_rows(wrapped, wrapped.state_dict(), [0, 1])

everybodys, three = sharded(0)
train(everybodys, three, range(2), [dear.rank()])
same(everybodys.state_dict(), alone(0, range(2), [0, 1, 2, 3]))
for call in (dear.dtensor_state_dict, functools.partial(dear.save_checkpoint, "folder")):
    raises(RuntimeError, "ranks 0 and 1 of 4 are in different ones (rank 0 of 2, and rank 0 of 2)", call, everybodys)
train(everybodys, three, range(2, 3), [dear.rank()])
same(everybodys.state_dict(), alone(0, range(3), [0, 1, 2, 3]))
everybody = dear.Mesh(all=4)
other = fsdp.fully_shard(torch.nn.Linear(2, 2), mesh=everybody if me == 3 else mesh)
last = torch.optim.SGD(other.parameters(), 0.1)
raises(ValueError, "rank 1 shards over ranks [1, 3] and rank 3 over [0, 1, 2, 3]", other, torch.ones(1, 2))
print("the end", flush=True)
"""

# The default group has all ranks of the job, in reverse order.
REVERSED = """
me = int(__import__("os").environ["OMPI_COMM_WORLD_RANK"])
dear.init(torch_distributed=False)
dist.init_process_group("gloo", store=dist.FileStore("store", 4), rank=3 - me, world_size=4)
assert (dear.rank(), dear.size(), dist.get_rank()) == (me, 4, 3 - me)
mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("part", "data"))["data"]
part = me // 2
mine = [2 * part, 2 * part + 1]
assert mesh.mesh.tolist() == [2 - 2 * part, 3 - 2 * part]
model, optimizers, expected = check(part, mine, mesh=mesh)
check_rows(model, expected, mesh.mesh.tolist())

model, optimizers, expected = check(0, [0, 1, 2, 3], mesh=DeviceMesh("cpu", [0, 1, 2, 3]))
dear.save_checkpoint("folder", model, optimizers, extra={"step": me})
other, theirs = sharded(0)
train(other, theirs, range(5, 6), [dear.rank()])
assert dear.load_checkpoint("folder", other, theirs) == {"step": 0}
same(other.state_dict(), expected)
train(other, theirs, range(3, 5), [dear.rank()])
same(other.state_dict(), alone(0, range(5), [0, 1, 2, 3]))
check_rows(model, expected, [0, 1, 2, 3])
print("the end", flush=True)
"""

# The job is ranks {0, 1} of the default group, and another job is {2, 3}.
PARTS = """
import torch.multiprocessing as mp

def work(me, port):
    dist.init_process_group("gloo", rank=me, world_size=4, init_method=f"tcp://127.0.0.1:{port}")
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    part = me // 2
    theirs = [2 * part, 2 * part + 1]
    dear.init(comm=groups[part])
    if me % 2:
        dist.new_group([me], use_local_synchronization=True)  # so that ranks have different numbers of groups
    assert (dear.rank(), dear.size()) == (me % 2, 2)
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("part", "data"))["data"]
    for options in ({"mesh": mesh}, {}, {"mesh": dear.Mesh(data=2)}):
        model, optimizers, expected = check(part, [0, 1], **options)
        dear.save_checkpoint(f"folder{part}", model, optimizers)
        dear.save_checkpoint(f"later{part}", model, optimizers, background=True).result()
        for folder in ("folder", "later"):
            other, others = sharded(part)
            train(other, others, range(5, 6), [dear.rank()])
            dear.load_checkpoint(f"{folder}{part}", other, others)
            same(other.state_dict(), expected)
        state = dear.sharded_state_dict(model, optimizers)
        held = sum(value.held.numel() for value in state["model"].values())
        assert held < 0.75 * sum(value.numel() for value in expected.values())
        check_rows(model, expected, theirs)
    crossing = fsdp.fully_shard(torch.nn.Linear(2, 2), mesh=DeviceMesh("cpu", [0, 2]))
    last = torch.optim.SGD(crossing.parameters(), 0.1)
    raises(ValueError, "over ranks [0, 2] of its default group", crossing, torch.ones(1, 2))
    dear.shutdown()
    dist.barrier()
    dist.destroy_process_group()
    print("the end", flush=True)

if __name__ == "__main__":
    mp.spawn(work, args=(int(sys.argv[1]),), nprocs=4)
"""


@pytest.mark.parametrize("script", [APART, REVERSED], ids=["of some ranks", "in another order"])
def test_a_default_group_that_is_not_the_job(script: str, tmp_path: Path) -> None:
    result = run_script(tmp_path, COMMON + script, 4).check()
    assert result.output.count("the end") == 4


@pytest.mark.full
def test_a_default_group_of_several_jobs(tmp_path: Path) -> None:
    meeting = Meeting([], "here")  # its port is kept free until the test is over
    result = run_script(tmp_path, COMMON + PARTS, 1, "single", str(meeting.port)).check()
    assert result.output.count("the end") == 4
