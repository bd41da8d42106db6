"""A second backward pass before `step()`: it has always been there, comes later, or is inside `no_sync()`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.spmd.one_process import SGD, as_in_one_process, loss_of, small_model, train
from tests.spmd.strategies import WRAP

WAYS = ("dear", "dear-layerwise", "wfbp", "mgwfbp", "bytescheduler", "oss")


def _two_passes(model: torch.nn.Module, optimizer: Any, alone: bool, number: int) -> None:
    optimizer.zero_grad()
    loss_of(model, number, alone).backward()
    loss_of(model, number + 100, alone).backward()
    optimizer.step()


@pytest.mark.parametrize("way", WAYS)
def test_two_passes_that_the_first_step_has_are_summed(way: str) -> None:
    def script(model: torch.nn.Module, optimizer: Any, alone: bool) -> None:
        for step in range(4):
            _two_passes(model, optimizer, alone, step)

    as_in_one_process(way, script)


@pytest.mark.parametrize("way", WAYS)
def test_a_second_pass_that_comes_later_is_refused(way: str) -> None:
    """A bucket is on its way after the first. Every rank raises, at the gradient, before any takes a step."""
    model = small_model()
    optimizer = WRAP[way](SGD(model.parameters(), lr=0.1), model)
    train(model, optimizer, False)
    optimizer.synchronize()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match=r"was computed again before step\(\).*no_sync\(\)"):
        _two_passes(model, optimizer, False, 2)
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("way", WAYS)
def test_a_second_pass_that_comes_later_is_announced_by_no_sync(way: str) -> None:
    def script(model: torch.nn.Module, optimizer: Any, alone: bool) -> None:
        train(model, optimizer, alone)
        for step in range(2, 5):
            optimizer.zero_grad()
            if step % 2 == 0:
                if alone:
                    loss_of(model, step + 100, alone).backward()
                else:
                    with optimizer.no_sync():
                        loss_of(model, step + 100, alone).backward()
            loss_of(model, step, alone).backward()
            optimizer.step()

    as_in_one_process(way, script)
