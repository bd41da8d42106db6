"""Whole parameters that lie once in the memory of each host."""

from __future__ import annotations

import gc
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import dear
import fsdp
from tests.spmd.models import double_model
from tests.spmd.strategies import hosts, on_hosts
from tests.spmd.training import local_loss, same_everywhere, same_values
from tests.spmd_plugin import RANK, SIZE

pytestmark = pytest.mark.skipif(SIZE < 2, reason="needs ranks that share a host")
PER_HOST = 2 if SIZE == 4 else SIZE


def _trained(make: Any, steps: int = 3, **options: Any) -> tuple[torch.nn.Module, Any]:
    model = double_model("Mlp")
    optimizer = make(torch.optim.AdamW(model.parameters(), 0.01), model, threshold_mb=0.001, **options)
    _train(model, optimizer, range(steps))
    return model, optimizer


def _train(model: torch.nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        local_loss(model, step).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()


@pytest.mark.parametrize("two_level", [False, True])
def test_the_bits_are_those_of_parameters_of_each_ranks_own(two_level: bool) -> None:
    if two_level and SIZE != 4:
        pytest.skip("needs two hosts of two ranks")
    with hosts(PER_HOST, two_level):
        expected, theirs = _trained(dear.DistributedOptimizer)
        model, mine = _trained(dear.DistributedOptimizer, residency="host")
    same = torch.equal if two_level or SIZE == PER_HOST else torch.allclose
    for (name, value), (_, wanted) in zip(model.state_dict().items(), expected.state_dict().items(), strict=True):
        assert same(value, wanted), name
        same_everywhere(value)
    states = [optimizer.state_dict()["state"] for optimizer in (mine, theirs)]
    for index, state in states[1].items():
        for key, value in state.items():
            assert same(torch.as_tensor(states[0][index][key]), torch.as_tensor(value)), key


def test_ranks_of_a_host_have_one_copy() -> None:
    model, optimizer = _trained(on_hosts)
    optimizer.synchronize()
    first = next(model.parameters())
    dear.barrier()
    if RANK % PER_HOST == 0:
        first.data.fill_(RANK + 1.0)
    dear.barrier()
    assert first.data.eq(float(RANK // PER_HOST * PER_HOST + 1)).all()
    dear.barrier()


def _pss() -> int:
    """Bytes of this process in memory that processes share, each shared page divided by how many have it."""
    text = Path("/proc/self/smaps").read_text()
    found = re.findall(
        r"^\S+-\S+ \S+ \S+ \S+ \S+ +(\S*dear-\S*)[^\n]*\n(?:(?!\S+-\S+ ).*\n)*?Pss: +(\d+) kB", text, re.M
    )
    return sum(int(size) for _, size in found) * 1024


def test_memory() -> None:
    gc.collect()
    dear.barrier()
    before = _pss()  # of what others than this test have left
    dear.barrier()
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)))
    optimizer = on_hosts(torch.optim.Adam(model.parameters(), 1e-3), model, threshold_mb=1)
    numel = sum(parameter.numel() for parameter in model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 512)).sum().backward()
        optimizer.step()
    optimizer.synchronize()
    dear.barrier()
    assert 0.95 * 4 / PER_HOST < (_pss() - before) / numel < 1.1 * 4 / PER_HOST
    for bucket in optimizer._engine.order:
        assert not bucket.gradients.there
    dear.barrier()


def test_a_rank_sends_its_shares_to_other_hosts_alone() -> None:
    _model, optimizer = _trained(on_hosts)
    numel = sum(bucket.spec.padded_numel for bucket in optimizer._engine.order)
    gathered = []
    for bucket in optimizer._engine.order:
        operation = bucket.gathering
        assert operation is not None
        gathered.append(operation.recv.numel())
        assert operation.comm.shard_size == SIZE // PER_HOST
    assert sum(gathered) == numel // PER_HOST, "a line gathers its own shards"


@pytest.mark.parametrize("whose", ["model", "optimizer"])
def test_without_zero_grad_gradients_add_up(whose: str) -> None:
    def train(optimizer: Any, model: torch.nn.Module) -> None:
        for step in range(4):
            if step == 2:
                (model if whose == "model" else optimizer).zero_grad(set_to_none=False)
            local_loss(model, step).backward()
            optimizer.step()

    models = []
    for make in (dear.DistributedOptimizer, on_hosts, fsdp.DistributedOptimizer):
        model = double_model("Mlp")
        train(make(torch.optim.SGD(model.parameters(), 0.05), model, threshold_mb=0.001), model)
        models.append(model.state_dict())
    for name, wanted in models[0].items():
        for found in models[1:]:
            torch.testing.assert_close(found[name], wanted, rtol=1e-12, atol=1e-13)


def test_a_second_backward_is_refused() -> None:
    model, optimizer = _trained(on_hosts)
    optimizer.zero_grad()
    local_loss(model, 5).backward()
    with pytest.raises(RuntimeError, match=r"computed again before step\(\)"):
        local_loss(model, 6).backward()
    optimizer.zero_grad()
    _train(model, optimizer, range(5, 6))
    for value in model.parameters():
        same_everywhere(value.detach())


def test_parameters_with_memory_of_their_own_return() -> None:
    model, optimizer = _trained(on_hosts)
    expected, theirs = _trained(dear.DistributedOptimizer)
    for each, owner in ((model, optimizer), (expected, theirs)):
        for parameter in each.parameters():
            parameter.data = parameter.detach() * 0.5
        _train(each, owner, range(3, 6))
    for mine, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-11, atol=1e-12)
        same_everywhere(mine.detach())


def test_the_next_optimizer_has_memory_of_each_ranks_own() -> None:
    model, _optimizer = _trained(on_hosts)
    expected, _theirs = _trained(dear.DistributedOptimizer)
    for each in (model, expected):
        after = dear.DistributedOptimizer(torch.optim.SGD(each.parameters(), 0.1), each, strategy="wfbp")
        _train(each, after, range(3, 5))
    for mine, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-11, atol=1e-12)
        same_everywhere(mine.detach())


def test_another_plan() -> None:
    model, optimizer = _trained(on_hosts)
    expected, theirs = _trained(dear.DistributedOptimizer)
    for each, owner in ((model, optimizer), (expected, theirs)):
        owner.replan(owner.strategy.at({"threshold_mb": 25.0}))
        _train(each, owner, range(3, 6))
    for mine, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-11, atol=1e-12)


def test_checkpoints(folder: Path) -> None:
    model, optimizer = _trained(on_hosts)
    dear.save_checkpoint(folder, model, optimizer)
    for make in (dear.DistributedOptimizer, on_hosts):
        other, theirs = _trained(make, steps=1)
        dear.load_checkpoint(folder, other, theirs)
        same_values(other, model)
        _train(other, theirs, range(3, 5))
        for value in other.parameters():
            same_everywhere(value.detach())


@pytest.mark.parametrize(
    "options",
    [
        {"policy": "rb"},
        {"eager": True},
        {"gather_dtype": torch.bfloat16},
        {"shard_group": 2},
        {"all_reduced": 0.5},
        {"exclude_parts": "allgather"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_it_does_not_go_together_with(options: dict[str, Any]) -> None:
    model = double_model("Mlp")
    with pytest.raises(ValueError, match=f"does not go together with {next(iter(options))}"):
        on_hosts(torch.optim.SGD(model.parameters(), 0.1), model, **options)


def test_optimizers_that_need_whole_parameters_are_refused() -> None:
    model = double_model("Mlp")
    with pytest.raises(ValueError, match="each rank update its share"):
        on_hosts(torch.optim.LBFGS(model.parameters()), model)


def test_rows_that_forward_shortens_are_refused() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(8, 4, max_norm=1.0), torch.nn.Linear(4, 1))
    with pytest.raises(ValueError, match=r"shortens rows of '0\.weight'"):
        on_hosts(torch.optim.SGD(model.parameters(), 0.1), model)


@pytest.mark.usefixtures("sets_of_a_test")
def test_process_sets_are_refused() -> None:
    model = double_model("Mlp")
    some = dear.add_process_set(range(SIZE - 1))
    with pytest.raises(ValueError, match="for all ranks of the job so far"):
        on_hosts(torch.optim.SGD(model.parameters(), 0.1), model, process_set=some)
    dear.remove_process_set(some)


def test_hosts_with_one_rank_each_are_refused() -> None:
    model = double_model("Mlp")
    with hosts(1), pytest.raises(ValueError, match=r"each of the .* hosts has one"):
        dear.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, residency="host")
    with pytest.raises(ValueError, match="residency should be 'host'"):
        dear.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, residency="gpu")  # type: ignore[arg-type]


def test_ranks_with_less_data() -> None:
    models = []
    for make in (dear.DistributedOptimizer, on_hosts):
        model = double_model("Mlp")
        optimizer = make(torch.optim.AdamW(model.parameters(), 0.01), model, threshold_mb=0.001)
        for step in range(4 if RANK == 0 else 2):
            optimizer.zero_grad()
            local_loss(model, step).backward()
            optimizer.step()
        dear.join()
        models.append(model.state_dict())
    for name, wanted in models[0].items():
        torch.testing.assert_close(models[1][name], wanted, rtol=1e-11, atol=1e-12)
        same_everywhere(models[1][name])
