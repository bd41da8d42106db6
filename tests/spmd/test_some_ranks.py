"""Models that some ranks of the job shard among themselves: a rank's number there is another one than in the job."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import dear
import fsdp
from overlap.horovod.controller.enqueue import runtime
from tests.spmd.models import double_model
from tests.spmd.training import assert_close, local_loss, values_of
from tests.spmd_plugin import SIZE

# The ranks of each model; a rank that is alone is outside of the set that the others have.
PARTS = {
    4: {"halves": [[0, 1], [2, 3]], "the odd ones": [[1, 3], [0], [2]], "all but the first": [[0], [1, 2, 3]]},
    3: {"the last ones": [[0], [1, 2]], "the outer ones": [[0, 2], [1]]},
    2: {"each alone": [[0], [1]]},
}.get(SIZE, {"all": [[*range(SIZE)]]})


@pytest.fixture(autouse=True)
def group_of_a_test(sets_of_a_test: None) -> Iterator[None]:
    """One rank has no default group by itself."""
    mine = not dist.is_initialized()
    if mine:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if mine:
        dist.destroy_process_group()


def _mine(parts: list[list[int]]) -> list[int]:
    return next(part for part in parts if dear.rank() in part)


def _twins(ranks: list[int]) -> tuple[Any, Any]:
    """Those of each part have values of their own."""
    models = double_model("Mlp"), double_model("Mlp")
    for model in models:
        for parameter in model.parameters():
            parameter.data.mul_(1.0 + 0.25 * ranks[0])
    if dear.rank() != ranks[0]:  # whose values count
        for parameter in models[0].parameters():
            parameter.data.mul_(0.5)
    return models


def _optimizers(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [each for each in model.parameters() if each.dim() > 1]
    others = [each for each in model.parameters() if each.dim() == 1]
    return [torch.optim.SGD(matrices, 0.05, momentum=0.9), torch.optim.AdamW(others, 1e-2)]


def _sharded(way: str, parts: list[list[int]], model: Any) -> list[Any]:
    """All ranks make the sets, or meshes, of all parts; a rank alone is outside of a set."""
    ranks = _mine(parts)
    if way == "fully_shard":
        meshes = {part[0]: DeviceMesh("cpu", part) for part in parts}
        fsdp.fully_shard(model, mesh=meshes[ranks[0]])
        return _optimizers(model)
    sets = {part[0]: dear.add_process_set(part) for part in parts if len(part) > 1}
    given = sets.get(ranks[0], next(iter(sets.values()), dear.global_process_set if SIZE == 1 else None))
    if given is None:  # each alone
        given = runtime().registered((0,)) or dear.add_process_set([0])  # other tests may have made it
    return [fsdp.DistributedOptimizer(each, model, process_set=given) for each in _optimizers(model)]


def _train(model: torch.nn.Module, optimizers: list[Any], steps: range, ranks: list[int] | None = None) -> None:
    for step in steps:
        for rank in ranks or [dear.rank()]:
            (local_loss(model, step, rank) / len(ranks or [0])).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for each in optimizers:
            each.step()
            each.zero_grad()


@pytest.mark.parametrize("way", ["wrapped", "fully_shard"])
@pytest.mark.parametrize("name", PARTS)
def test_each_part_trains_as_one_process_with_its_data(name: str, way: str) -> None:
    parts = PARTS[name]
    ranks = _mine(parts)
    mine, alone = _twins(ranks)
    optimizers, references = _sharded(way, parts, mine), _optimizers(alone)
    _train(mine, optimizers, range(3))
    _train(alone, references, range(3), ranks)
    if dear.rank() == ranks[-1]:  # the others need not ask
        assert_close(mine.state_dict(), alone.state_dict(), "model")
        for number, (optimizer, reference) in enumerate(zip(optimizers, references, strict=True)):
            assert_close(optimizer.state_dict()["state"], reference.state_dict()["state"], f"optimizer {number}")
    dear.barrier()
    with dear.whole(mine):
        for value, expected in zip(mine.parameters(), alone.parameters(), strict=True):
            assert_close(value.detach(), expected.detach(), "whole")
    saved = copy.deepcopy((mine.state_dict(), [each.state_dict() for each in optimizers]))
    _train(mine, optimizers, range(3, 5))
    expected_values = values_of(mine)
    mine.load_state_dict(saved[0])
    for optimizer, state in zip(optimizers, saved[1], strict=True):
        optimizer.load_state_dict(state)
    _train(mine, optimizers, range(3, 5))
    for value, other in zip(values_of(mine), expected_values, strict=True):
        assert torch.equal(value, other)


@pytest.mark.parametrize("way", ["wrapped", "fully_shard"])
@pytest.mark.parametrize("name", PARTS)
def test_dtensors_are_over_the_ranks_of_the_part(name: str, way: str) -> None:
    made = dear.allgather_object(len(torch.distributed.distributed_c10d._world.pg_names))
    if len(set(made)) > 1:
        pytest.skip("torch names groups by how many a rank has, and other tests have made uneven numbers")
    parts = PARTS[name]
    ranks = _mine(parts)
    mine, _ = _twins(ranks)
    optimizers = _sharded(way, parts, mine)
    _train(mine, optimizers, range(2))
    expected = copy.deepcopy(mine.state_dict())
    found = dear.dtensor_state_dict(mine)
    for name_of, value in found.items():
        if not isinstance(value, DTensor):
            continue
        assert value.device_mesh.mesh.tolist() == ranks
        chunks = torch.chunk(expected[name_of], len(ranks))
        place = ranks.index(dear.rank())
        assert torch.equal(value.to_local(), chunks[place] if place < len(chunks) else chunks[0][:0])
        assert torch.equal(value.full_tensor(), expected[name_of])
        with torch.no_grad():
            value.mul_(2.0)
    mine.load_state_dict(found)
    for name_of, value in mine.state_dict().items():
        assert torch.equal(value, expected[name_of] * (2 if isinstance(found[name_of], DTensor) else 1))


@pytest.mark.skipif(SIZE == 1, reason="one rank has no others")
def test_optimizers_with_other_ranks_have_no_dtensors_together() -> None:
    model = double_model("Mlp")
    first = dear.add_process_set([0])
    sgd, adamw = _optimizers(model)
    optimizers = [fsdp.DistributedOptimizer(sgd, model, process_set=first), fsdp.DistributedOptimizer(adamw, model)]
    with pytest.raises(ValueError, match=r"the model's optimizers have different ranks \(\[0"):
        dear.dtensor_state_dict(model)
    with pytest.raises(ValueError, match=rf"by all {SIZE} ranks of the job, and the optimizer has a process set of 1"):
        dear.sharded_state_dict(model, optimizers)
