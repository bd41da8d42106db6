"""ShardedGradScaler: on a plain optimizer and on OSS, where all ranks skip a step or none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dear
from oss import OSS, ShardedGradScaler, checkpoint_wrapper
from tests.spmd.training import same_values


class _Model(nn.Module):
    """The tutorial's, smaller."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        ffn = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 6))
        self.ffn_module = checkpoint_wrapper(ffn, **options)
        self.last_linear = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last_linear(self.ffn_module(x))


def _loss(model: nn.Module, step: int, rank: int, bad: bool = False) -> torch.Tensor:
    torch.manual_seed(100 * step + rank)
    factor = float("inf") if bad else 1.0
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(torch.randn(4, 6)).square().mean() * factor


def _trained(optimizer: Any, model: nn.Module, scaler: Any, ranks: list[int], bad: list[int], *, unscale: bool) -> None:
    """Three steps with the sum of the gradients on the data of `ranks`, infinite in the second one on those in `bad`."""
    for step in range(3):
        optimizer.zero_grad()
        for rank in ranks:
            scaler.scale(_loss(model, step, rank, bad=step == 1 and rank in bad)).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_on_a_plain_optimizer_all_ranks_skip_what_one_has_to(fused: bool, unscale: bool) -> None:
    last = dear.size() - 1
    mine, reference = _Model(), _Model()
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.1, fused=fused)
    scaler = ShardedGradScaler(init_scale=2.0**10)
    _trained(optimizer, mine, scaler, [dear.rank()], [last], unscale=unscale)

    plain = torch.optim.SGD(reference.parameters(), lr=0.1, fused=fused)
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    _trained(plain, reference, theirs, [dear.rank()], [dear.rank()], unscale=unscale)
    same_values(mine, reference)
    assert scaler.get_scale() == theirs.get_scale() == 2.0**9


def test_on_oss_all_ranks_skip_what_one_has_to_and_send_the_rest() -> None:
    last = dear.size() - 1
    mine, reference = _Model(), _Model()
    optimizer = OSS(mine.parameters(), torch.optim.SGD, lr=0.1)
    scaler = ShardedGradScaler(init_scale=2.0**10)
    _trained(optimizer, mine, scaler, [dear.rank()], [last], unscale=False)

    other = OSS(reference.parameters(), torch.optim.SGD, lr=0.1)
    for step in (0, 2):
        other.zero_grad()
        _loss(reference, step, dear.rank()).backward()
        other.step()
    same_values(mine, reference)  # a scale that is a power of two rounds nothing
    assert scaler.get_scale() == 2.0**9
    assert not torch.equal(mine.last_linear.weight, _Model().last_linear.weight)


def test_unscaled_gradients_are_clipped_by_their_norm() -> None:
    model = _Model()
    optimizer = OSS(model.parameters(), torch.optim.SGD, lr=0.1)
    scaler = ShardedGradScaler(init_scale=2.0**10)
    loss = _loss(model, 0, 0)  # the same on every rank
    expected = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = optimizer.clip_grad_norm(1e-3)
    torch.testing.assert_close(norm, torch.linalg.vector_norm(torch.stack([g.norm() for g in expected])))
    scaler.step(optimizer)
    scaler.update()


def test_a_rank_without_gradients_skips_with_the_others() -> None:
    model = nn.Linear(2, 1)
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = ShardedGradScaler(init_scale=8.0)
    loss = scaler.scale(model(torch.full((1, 2), float("inf"))).sum())
    if dear.rank() == dear.size() - 1:
        loss.backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(model.weight, before)
    assert scaler.get_scale() == 4.0


def test_gradients_in_float16_are_unscaled() -> None:
    model = nn.Linear(2, 1, bias=False, dtype=torch.float16)
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = ShardedGradScaler(init_scale=8.0)
    scaler.scale(model(torch.ones(1, 2, dtype=torch.float16)).sum()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert model.weight.tolist() == [[0.5, 0.5]]


def test_a_group_of_its_own_and_a_scaler_that_is_off() -> None:
    if dear.size() > 1:
        alone = [dist.new_group([rank]) for rank in range(dear.size())][dear.rank()]
        mine = _Model()
        scaler = ShardedGradScaler(init_scale=2.0**10, process_group=alone)
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
        _trained(optimizer, mine, scaler, [dear.rank()], [0], unscale=True)
        assert scaler.get_scale() == (2.0**9 if dear.rank() == 0 else 2.0**10)
        with pytest.raises(TypeError, match="process group should be"):
            ShardedGradScaler(process_group=[0])
    off = ShardedGradScaler(enabled=False)
    loss = torch.ones(1)
    assert off.scale(loss) is loss


def test_torchs_scaler_is_refused_where_it_would_skip_on_some_ranks_only() -> None:
    model = _Model()
    optimizer = OSS(model.parameters(), torch.optim.SGD, lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(_loss(model, 0, dear.rank())).backward()
    if dear.size() == 1:
        scaler.step(optimizer)
        return
    with pytest.raises(RuntimeError, match=r"use oss\.ShardedGradScaler"):
        scaler.step(optimizer)
