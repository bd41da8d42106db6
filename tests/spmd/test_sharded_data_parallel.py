"""ShardedDataParallel with OSS: what one process gives, on all data."""

from __future__ import annotations

import copy
import functools
import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dear
from oss import OSS, ShardedDataParallel, ShardedDDP, ShardedGradScaler
from tests.spmd.listening import heard
from tests.spmd.training import local_loss


def _model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 3))


_loss = functools.partial(local_loss, width=6, dtype=torch.float32)


class _Reference:
    """One process: averages over the ranks' data; running statistics follow the first rank's."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def averages(self, steps: list[int]) -> None:
        self.optimizer.zero_grad()
        of_rank = []
        for rank in range(dear.size()):
            model = self.model if rank == 0 else copy.deepcopy(self.model)
            trained = [p for p in model.parameters() if p.requires_grad]
            loss = sum(_loss(model, step, rank) for step in steps)
            of_rank.append(torch.autograd.grad(loss, trained))
        trained = [p for p in self.model.parameters() if p.requires_grad]
        for parameter, gradients in zip(trained, zip(*of_rank, strict=True), strict=True):
            parameter.grad = torch.stack(gradients).sum(0) / dear.size()

    def step(self, *steps: int) -> None:
        self.averages(list(steps))
        self.optimizer.step()


def _close(mine: nn.Module, reference: nn.Module, **tolerance: float) -> None:
    for (name, value), other in zip(mine.state_dict().items(), reference.state_dict().values(), strict=True):
        torch.testing.assert_close(value, other, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


@pytest.mark.parametrize(("buffer", "buckets"), [(None, 1), (0, 3), (200, 1)])  # of three layers, of 99 elements
@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.AdamW])
def test_it_trains_as_one_process(cls: type[torch.optim.Optimizer], buffer: int | None, buckets: int) -> None:
    mine, reference = _model(dear.rank()), _model()
    optimizer = OSS(params=mine.parameters(), optim=cls, lr=0.05)
    model = ShardedDDP(mine, optimizer, reduce_buffer_size=buffer)
    single = _Reference(reference, cls(reference.parameters(), lr=0.05))
    model.train()
    for step in range(4):
        model.zero_grad()
        _loss(model, step, dear.rank()).backward()
        optimizer.step()
        single.step(step)
    _close(mine, reference)
    shell: Any = optimizer._updates.shown
    assert len(shell.buckets) == buckets
    shares = optimizer.partition_parameters()
    held = [parameter for group in shares[dear.rank()] for parameter in group["params"]]
    if cls is torch.optim.AdamW:
        assert set(map(id, held)) == {id(parameter) for parameter, state in shell.held_state.items() if state}
    found = [parameter for share in shares for group in share for parameter in group["params"]]
    assert sorted(map(id, found)) == sorted(map(id, optimizer.param_groups[0]["params"]))
    optimizer.consolidate_state_dict()
    saved, expected = optimizer.state_dict(), single.optimizer.state_dict()
    assert saved["param_groups"] == expected["param_groups"]
    torch.testing.assert_close(saved["state"], expected["state"])


def test_clipping_accumulation_and_a_scaler() -> None:
    mine, reference = _model(), _model()
    optimizer = OSS(mine.parameters(), torch.optim.SGD, lr=0.1)
    model = ShardedDataParallel(mine, optimizer, broadcast_buffers=False)
    single = _Reference(reference, torch.optim.SGD(reference.parameters(), lr=0.1))
    scaler = ShardedGradScaler(init_scale=2.0**10)
    for step in range(2):
        optimizer.zero_grad()
        with model.no_sync():
            scaler.scale(_loss(model, 2 * step, dear.rank())).backward()
        scaler.scale(_loss(model, 2 * step + 1, dear.rank())).backward()
        scaler.unscale_(optimizer)
        norm = optimizer.clip_grad_norm(0.05)
        scaler.step(optimizer)
        scaler.update()
        single.averages([2 * step, 2 * step + 1])
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(reference.parameters(), 0.05))
        single.optimizer.step()
    _close(mine[0], reference[0])
    before = copy.deepcopy(mine.state_dict())
    optimizer.zero_grad()
    bad = float("inf") if dear.rank() == dear.size() - 1 else 1.0
    scaler.scale(_loss(model.eval(), 9, dear.rank()) * bad).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**9
    assert all(torch.equal(value, before[name]) for name, value in mine.state_dict().items())
    optimizer.zero_grad()
    _loss(model, 10, dear.rank()).backward()
    optimizer.step()  # without the scaler, whose infinities were of that step alone
    assert not torch.equal(mine[0].weight, before["0.weight"])


@pytest.mark.parametrize("fp16", [False, True])
def test_reduce_shows_averages(fp16: bool) -> None:
    mine, reference = _model(), _model()
    optimizer = OSS(mine.parameters(), torch.optim.SGD, lr=0.1)
    model = ShardedDataParallel(mine, optimizer, reduce_fp16=fp16)
    _loss(model, 0, dear.rank()).backward()
    model.reduce()
    single = _Reference(reference, torch.optim.SGD(reference.parameters(), lr=0.1))
    single.averages([0])
    for parameter, other in zip(mine.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, **({"rtol": 0, "atol": 1e-3} if fp16 else {}))
    assert all(torch.equal(p.grad, p.grad.half().float()) for p in mine.parameters()) == fp16
    optimizer.step()


def test_ranks_keep_their_own_models_at_startup_where_they_should() -> None:
    model = _model(dear.rank())
    before = copy.deepcopy(model.state_dict())
    ShardedDDP(model, OSS(model.parameters()), sync_models_at_startup=False)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_state_from_before_goes_on_and_float16_travels() -> None:
    mine, reference = _model(), _model()
    optimizer = OSS(mine.parameters(), torch.optim.AdamW, lr=0.01, broadcast_fp16=True)
    plain = torch.optim.AdamW(reference.parameters(), lr=0.01)
    for model, each in ((mine, optimizer), (reference, plain)):
        each.zero_grad()
        _loss(model, 0, 0).backward()
        each.step()
    model = ShardedDDP(mine, optimizer, reduce_fp16=True)
    single = _Reference(reference, plain)
    for step in (1, 2):
        optimizer.zero_grad()
        _loss(model, step, dear.rank()).backward()
        optimizer.step()
        single.step(step)
    _close(mine, reference, rtol=0, atol=5e-3)
    saved = optimizer.state_dict()
    assert all(torch.equal(p, p.half().float()) for p in mine.parameters())
    assert [float(entry["step"]) for entry in saved["state"].values()] == [3.0] * 6
    assert saved["master"].keys() == saved["state"].keys()


def test_several_optimizers_and_what_is_frozen() -> None:
    mine, reference = _model(), _model()
    reference[0].requires_grad_(False)
    mine[0].requires_grad_(False)
    parts = [[*mine[0].parameters(), *mine[2].parameters()], list(mine[3].parameters())]
    optimizers = [OSS(part, torch.optim.SGD, lr=rate) for part, rate in zip(parts, (0.1, 0.2), strict=True)]
    model = ShardedDDP(mine, optimizers)
    head = [*reference[0].parameters(), *reference[2].parameters()]
    plain = torch.optim.SGD([{"params": head, "lr": 0.1}, {"params": reference[3].parameters(), "lr": 0.2}])
    single = _Reference(reference, plain)
    with heard(logging.WARNING) as said:
        for step in range(4):
            if step == 2:
                mine[0].requires_grad_(True)
                reference[0].requires_grad_(True)
                model.refresh_trainable()
            model.zero_grad()
            batches = [step] if step % 2 == 0 else [step, 10 + step]
            for batch in batches[:-1]:
                with model.no_sync():
                    _loss(model, batch, dear.rank()).backward()
            _loss(model, batches[-1], dear.rank()).backward()
            for optimizer in optimizers:
                optimizer.step()
            single.step(*batches)
    _close(mine, reference)
    assert [text for text in said if "are trained" in text] == [
        "ShardedDataParallel: 6 parameters are trained, which were 4"
    ]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_no_optimizer_knows_are_cleared_with_the_others(set_to_none: bool) -> None:
    model = _model()
    wrapped = ShardedDDP(model, OSS(model[0].parameters(), torch.optim.SGD, lr=0.1))
    _loss(wrapped, 0, dear.rank()).backward()
    assert model[3].weight.grad is not None
    assert model[3].weight.grad.any()
    wrapped.zero_grad(set_to_none)
    for parameter in (model[3].weight, model[3].bias):
        assert parameter.grad is None if set_to_none else not parameter.grad.any()


@pytest.fixture
def pair() -> tuple[nn.Module, OSS]:
    model = _model()
    return model, OSS(model.parameters(), torch.optim.SGD, lr=0.1)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_a_backward_pass_that_can_be_differentiated(pair: Any) -> None:
    """fairscale refuses gradients that have a graph."""
    alone = _model()
    reference = _Reference(alone, torch.optim.SGD(alone.parameters(), lr=0.1))
    module, optimizer = pair
    model = ShardedDDP(module, optimizer)
    for step in range(3):
        reference.step(step)
        optimizer.zero_grad()
        _loss(model, step, dear.rank()).backward(create_graph=True)
        optimizer.step()
    _close(module, alone)


def test_it_looks_like_the_module_and_sends_buffers(pair: Any) -> None:
    module, optimizer = pair
    module.note = "mine"
    model = ShardedDDP(module, optimizer)
    assert model.note == "mine"
    assert (model.is_multi_device_module, model.device_type) == (False, "cpu")
    assert set(model.state_dict()) == {f"module.{name}" for name in module.state_dict()}
    with torch.no_grad():
        module[2].running_mean.fill_(float(dear.rank()))
    model.sync_buffers()
    assert module[2].running_mean.tolist() == [0.0] * 8
    assert not hasattr(model, "nothing")


def test_what_it_cannot_do_is_refused(pair: Any) -> None:
    module, optimizer = pair
    with pytest.raises(TypeError, match="takes a module and its OSS"):
        ShardedDDP(module, torch.optim.SGD(module.parameters()))
    with pytest.raises(TypeError, match="takes a module and its OSS"):
        ShardedDDP(optimizer, module)
    with pytest.raises(ValueError, match="no OSS"):
        ShardedDDP(module, [])
    with pytest.raises(ValueError, match="auto_refresh_trainable"):
        ShardedDDP(module, optimizer, auto_refresh_trainable=False)
    with pytest.raises(ValueError, match="reduce_buffer_size"):
        ShardedDDP(module, optimizer, reduce_buffer_size=-1)
    if dear.size() > 1:
        alone = [dist.new_group([rank]) for rank in range(dear.size())][dear.rank()]
        with pytest.raises(ValueError, match="process_group has ranks"):
            ShardedDDP(module, optimizer, process_group=alone)
        with pytest.raises(ValueError, match=r"oss\.init\(comm=group\)"):
            ShardedDDP(module, OSS(module.parameters(), group=alone), process_group=alone)
    ShardedDDP(module, optimizer)
    with pytest.raises(RuntimeError, match="ask after it"):
        optimizer.partition_parameters()
    with pytest.raises(ValueError, match="make an OSS for each model"):
        ShardedDDP(module, optimizer)
