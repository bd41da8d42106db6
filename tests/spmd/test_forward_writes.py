"""Parameters that forward writes to: where replicas differ by it all ranks are told, where all write the same nobody is."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import dear
from overlap.features.forward_writes import WrittenInForward
from tests.spmd.listening import heard
from tests.spmd.one_process import SGD, loss_of
from tests.spmd.strategies import PACKAGES, WRAP


class Writes(nn.Module):
    """Writes to its parameter in forward from call `since` on, `how`."""

    def __init__(self, how: str, since: int = 0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6, dtype=torch.float64), requires_grad=how != "codebook")
        self.how, self.calls, self.since = how, 0, since

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.calls >= self.since:
            with torch.no_grad():
                if self.how in ("from the batch", "codebook"):
                    self.scale.mul_(0.9).add_(x.mean(0), alpha=0.1)
                elif self.how == "at first" and self.calls == 0:
                    self.scale.data.copy_(x.std(0) + 1)  # which leaves no version behind
                elif self.how == "without a version":
                    self.scale.data.mul_(0.9).add_(x.mean(0), alpha=0.1)
                elif self.how == "pointed elsewhere":
                    self.scale.data = self.scale.data + x.mean(0)
                elif self.how == "alike":
                    self.scale.clamp_(-0.5, 0.5)
        self.calls += 1
        return x * self.scale


def _wrapped(way: str, how: str, since: int = 0, *, trained_only: bool = False) -> tuple[nn.Module, Any]:
    torch.manual_seed(7)
    model = nn.Sequential(Writes(how, since), nn.Linear(6, 3)).double()
    mine = [each for each in model.parameters() if each.requires_grad or not trained_only]
    return model, WRAP[way](SGD(mine, 0.01), model)


def _train(model: nn.Module, optimizer: Any, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step, False).backward()
        optimizer.step()


@pytest.mark.parametrize("way", PACKAGES)
@pytest.mark.parametrize("how", ["from the batch", "at first", "pointed elsewhere", "codebook"])
def test_what_forward_makes_differ_is_named_once(how: str, way: str) -> None:
    model, optimizer = _wrapped(way, how, trained_only=True)
    if dear.size() == 1:
        _train(model, optimizer, 3)
        return
    with pytest.raises(WrittenInForward, match=r"parameter '0.scale' differs between ranks.*: forward writes to it"):
        _train(model, optimizer, 2)
    optimizer.zero_grad()
    _train(model, optimizer, 4)


@pytest.mark.parametrize(("how", "since", "found"), [("from the batch", 2, 3), ("without a version", 10, 63)])
def test_what_begins_late_is_found_too(how: str, since: int, found: int) -> None:
    if dear.size() == 1:
        pytest.skip("one rank cannot differ from itself")
    model, optimizer = _wrapped("wfbp", how, since)
    _train(model, optimizer, found + 1)
    with pytest.raises(WrittenInForward, match=r"parameter '0.scale' differs"):
        _train(model, optimizer, 1)


@pytest.mark.parametrize("way", PACKAGES)
@pytest.mark.parametrize("how", ["alike", "not at all"])
def test_where_all_ranks_write_the_same_nothing_is_said(how: str, way: str) -> None:
    model, optimizer = _wrapped(way, how)
    with heard(logging.WARNING) as said:
        for _ in range(20):
            _train(model, optimizer, 1)
            with torch.no_grad():
                model(torch.ones(1, 6, dtype=torch.float64))  # while parameters are on their way
    assert not said
    assert optimizer._engine.watcher is None  # most steps are not looked at


def test_when_training_ends_before_the_next_step_it_is_logged() -> None:
    model, optimizer = _wrapped("dear", "from the batch")
    _train(model, optimizer, 1)
    with heard(logging.ERROR) as said:
        optimizer.finish()
    assert len(said) == int(dear.size() > 1)
