"""Calls that communicate, between backward and step(): they work as in one process, or are refused on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dear
from overlap.core.closing import OtherRankFailed
from overlap.features.early import UpdatedEarly
from tests.spmd.one_process import loss_of, small_model
from tests.spmd.strategies import PACKAGES, WRAP

SIZE = 8  # of the batch


class _Growing(nn.Module):
    """Ranks may leave out the second layer; the last one is in no optimizer until the script adds it."""

    def __init__(self) -> None:
        super().__init__()
        torch.default_generator.manual_seed(7)
        self.first, self.second, self.late = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor, every: bool, late: bool) -> torch.Tensor:
        y = self.first(x)
        y = torch.cat([self.second(y[:1]), y[1:]]) if every else y
        return self.late(y) if late else y


def _trained(at: int, used_before: bool, wrap: Callable[[Any, nn.Module], Any] | None) -> list[torch.Tensor]:
    """With a group added after the backward pass of step `at`, by which it had gradients or none."""
    model = _Growing().double()
    optimizer: Any = torch.optim.SGD([*model.first.parameters(), *model.second.parameters()], 0.1, momentum=0.9)
    if wrap is not None:
        optimizer = wrap(optimizer, model)
    ranks = range(dear.size()) if wrap is None else (dear.rank(),)
    share = SIZE // dear.size()
    for step in range(4):
        model.zero_grad()
        batch = torch.randn(SIZE, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        late = step > at or (step == at and used_before)
        for rank in ranks:
            y = model(batch[rank * share :][:share], step != at or rank == 0, late)
            (y.square().mean() / len(ranks)).backward()
        if step == at:
            optimizer.add_param_group({"params": [*model.late.parameters()], "lr": 0.05})
        optimizer.step()
    if wrap is not None:
        optimizer.synchronize()
    return [*model.parameters()]


@pytest.mark.parametrize("used_before", [False, True])
@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("way", PACKAGES)
def test_a_group_added_after_backward(way: str, at: int, used_before: bool) -> None:
    """Ranks have used different parameters in it, so reductions stand at different places; also in the first iteration."""
    seen, right = _trained(at, used_before, WRAP[way]), _trained(at, used_before, None)
    torch.testing.assert_close(seen, right, rtol=1e-9, atol=1e-12)


def _last_has_gradients(model: nn.Module, optimizer: Any) -> None:
    """In the third step, and nobody else has."""
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, step, False).backward()
        optimizer.step()
    optimizer.zero_grad()
    if dear.rank() == dear.size() - 1:
        loss_of(model, 2, False).backward()


REFUSED: dict[str, Callable[[Any], Any]] = {
    "replan": lambda optimizer: optimizer.replan(optimizer.strategy),
    "replan after synchronize": lambda optimizer: (optimizer.synchronize(), optimizer.replan(optimizer.strategy)),
    "a group after synchronize": lambda optimizer: (
        optimizer.synchronize(),
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, dtype=torch.float64))]}),
    ),
}


@pytest.mark.parametrize("call", REFUSED)
@pytest.mark.parametrize("way", PACKAGES)
def test_what_cannot_come_there_is_refused_on_every_rank(way: str, call: str) -> None:
    """Where one rank alone has had a batch, too; then the step goes on."""
    model = small_model()
    optimizer = WRAP[way](torch.optim.SGD(model.parameters(), 0.1), model)
    _last_has_gradients(model, optimizer)
    with pytest.raises(RuntimeError, match=r"replan after step|gradients were averaged already"):
        REFUSED[call](optimizer)
    optimizer.step()
    optimizer.synchronize()
    mine = [*model.parameters()]
    assert all(map(torch.equal, mine, dear.broadcast_object(mine)))


EARLY: dict[str, Callable[[Any, nn.Module], Any]] = {
    "synchronize": lambda optimizer, _: optimizer.synchronize(),
    "clip": lambda optimizer, _: optimizer.clip_grad_norm_(1.0),
    "torch's clip": lambda _, model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "a group": lambda optimizer, _: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]}),
}


@pytest.mark.parametrize("call", EARLY)
def test_early_updates_refuse_on_every_rank(call: str) -> None:
    """Not only where gradients are."""
    model = small_model()
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = dear.DistributedOptimizer(sgd, model, eager=True, threshold_mb=0.0001)
    _last_has_gradients(model, optimizer)
    with pytest.raises(UpdatedEarly if dear.rank() == dear.size() - 1 else OtherRankFailed, match="eager=False"):
        EARLY[call](optimizer, model)
    optimizer.step()
    optimizer.synchronize()
