"""Shards divided within groups of ranks, and averaged over all of them: hybrid sharding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import dear
import fsdp
from overlap.transport.objects import SignatureMismatch
from tests.spmd.loops import Run
from tests.spmd.models import double_model
from tests.spmd.training import local_loss, same_everywhere, same_values
from tests.spmd_plugin import RANK, SIZE

pytestmark = pytest.mark.skipif(SIZE != 4, reason="needs two groups of two ranks")
STRATEGIES = ["dear", "fsdp", "osdp"]


def _trained(strategy: str, shard_group: Any, steps: int = 3, **options: Any) -> tuple[torch.nn.Module, Any]:
    model = double_model("Mlp")
    plain = torch.optim.AdamW(model.parameters(), 0.01)
    optimizer = dear.DistributedOptimizer(
        plain, model, strategy=strategy, shard_group=shard_group, threshold_mb=0.001, **options
    )
    for step in range(steps):
        optimizer.zero_grad()
        local_loss(model, step).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return model, optimizer


def _alone(steps: int = 3) -> torch.nn.Module:
    model = double_model("Mlp")
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for step in range(steps):
        optimizer.zero_grad()
        losses = [local_loss(model, step, rank) for rank in range(SIZE)]
        (sum(losses[1:], losses[0]) / SIZE).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return model


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("shard_group", [1, 2, 4, "host", [[0, 2], [3, 1]]])
def test_training_equals_one_process(strategy: str, shard_group: Any) -> None:
    model, optimizer = _trained(strategy, shard_group)
    saved = model.state_dict()
    for name, value in _alone().state_dict().items():
        torch.testing.assert_close(saved[name], value, rtol=1e-11, atol=1e-12)
        same_everywhere(saved[name])
    state = optimizer.state_dict()["state"]
    assert len(state) == len(list(model.parameters()))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_rank_holds_its_share_of_the_groups(strategy: str) -> None:
    model, optimizer = _trained(strategy, 2)
    whole = sum(parameter.numel() for parameter in model.parameters())
    mine = torch.tensor([one.stop - one.start for one in optimizer._engine.sharded.pieces]).sum()
    assert int(dear.allreduce(mine.double(), op=dear.Sum)) == 2 * whole
    assert optimizer._engine.transit._lanes[0].size == 2, "parameters are gathered inside a group"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_checkpoints_are_of_no_number_of_groups(strategy: str, tmp_path: Path) -> None:
    folder = Path(dear.broadcast_object(str(tmp_path)))
    model, optimizer = _trained(strategy, 2)
    dear.save_checkpoint(folder, model, optimizer)
    other, theirs = _trained("dear" if strategy == "fsdp" else "fsdp", None, steps=1)
    dear.load_checkpoint(folder, other, theirs)
    same_values(other, model)
    first, second = (each.state_dict()["state"] for each in (optimizer, theirs))
    for index, state in first.items():
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(second[index][key])), key


def test_both_ways_to_load_give_each_group_its_shares(tmp_path: Path) -> None:
    folder = Path(dear.broadcast_object(str(tmp_path)))
    model, optimizer = _trained("fsdp", 2)
    dear.save_checkpoint(folder, model, optimizer)
    for way in ("file", "memory"):
        other, theirs = _trained("fsdp", [[0, 2], [1, 3]], steps=1)
        if way == "file":
            dear.load_checkpoint(folder, other, theirs)
        else:
            other.load_state_dict(model.state_dict())
            theirs.load_state_dict(optimizer.state_dict())
        dear.barrier()
        same_values(other, model)
        for each, one in ((model, optimizer), (other, theirs)):
            one.zero_grad()
            local_loss(each, 3).backward()
            one.step()
        saved = model.state_dict()
        for name, value in other.state_dict().items():
            torch.testing.assert_close(value, saved[name], rtol=1e-11, atol=1e-12)
        model, optimizer = _trained("fsdp", 2)


@pytest.mark.parametrize("mesh", ["dear", "torch"])
def test_fully_shard_over_two_axes(mesh: str) -> None:
    """Sharded along the last one, as torch does."""
    layout = dear.Mesh(replicate=2, shard=2)
    model = double_model("Mlp")
    fsdp.fully_shard(model, mesh=layout if mesh == "dear" else layout.device_mesh())
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for step in range(3):
        optimizer.zero_grad()
        local_loss(model, step).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    saved = model.state_dict()
    for name, value in _alone().state_dict().items():
        torch.testing.assert_close(saved[name], value, rtol=1e-11, atol=1e-12)
    assert optimizer._engine.unsharder._first.lanes[0].size == 2


def test_ranks_of_different_groups_use_different_modules() -> None:
    """What one group alone has used is updated in both; what none has, in neither."""
    model = torch.nn.ModuleList(torch.nn.Linear(8, 8, dtype=torch.float64) for _ in range(4))
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 0.5)
    optimizer = fsdp.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), 0.1), model, threshold_mb=0.0001, shard_group=2
    )
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = torch.ones(2, 8, dtype=torch.float64)
    for _ in range(2):
        optimizer.zero_grad()
        model[RANK // 2](x).sum().backward()
        optimizer.step()
    after = model.state_dict()
    for name, value in after.items():
        assert torch.equal(value, before[name]) is (int(name[0]) >= 2), name
        same_everywhere(value)


@pytest.mark.parametrize(
    ("shard_group", "message"),
    [
        (3, "3 does not divide the 4 ranks"),
        ([[0], [1, 2, 3]], "groups of 1, 3 ranks"),
        ("rack", "'rack'"),
        (0, "0 does not"),
    ],
)
def test_groups_that_are_none_raise_on_every_rank(shard_group: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _trained("dear", shard_group)


def test_ranks_that_differ_raise_on_every_rank() -> None:
    with pytest.raises(SignatureMismatch, match="shard_group"):
        _trained("dear", 1 + RANK % 2)


def test_policy_rb_gives_buckets_to_ranks() -> None:
    with pytest.raises(ValueError, match="policy='rb'"):
        _trained("dear", 2, policy="rb")


def test_joined_ranks_give_their_groups_their_shares() -> None:
    model, optimizer = _trained("fsdp", 2, steps=1)
    run = Run(model, optimizer, dear.rank(), dear.size())
    for step in range(1 + RANK):
        optimizer.zero_grad()
        run.loss(step).backward()
        optimizer.step()
    dear.join()
    for value in model.state_dict().values():
        same_everywhere(value)
