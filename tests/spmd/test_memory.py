"""What is done to memory that the wrapper does not know of: gradients behind autograd's back, parameters with aliases."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dear
from overlap.core.round import GradientChanged
from tests.spmd.listening import heard
from tests.spmd.strategies import PACKAGES, WRAP
from tests.spmd.training import local_loss

SHARDED = ("dear-layerwise", "oss")


def _in_place(gradient: torch.Tensor) -> None:
    gradient.mul_(0.1)


def _by_data(gradient: torch.Tensor) -> None:
    gradient.data.mul_(0.1)


def _by_numpy(gradient: torch.Tensor) -> None:
    gradient.numpy()[...] *= 0.1


@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("change", [_in_place, _by_data, _by_numpy])
@pytest.mark.parametrize("strategy", SHARDED)
def test_gradients_written_to_after_backward_are_noticed(
    strategy: str, change: Callable[[torch.Tensor], None], clipped: bool
) -> None:
    """Where they are clipped, too: it is their averages that were, which lie elsewhere."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(9, 20), torch.nn.Tanh(), torch.nn.Linear(20, 1)).double()
    optimizer = WRAP[strategy](torch.optim.SGD(model.parameters(), 0.1), model)
    for step in range(2):
        optimizer.zero_grad()
        local_loss(model, step).backward()
        optimizer.step()
    optimizer.zero_grad()
    local_loss(model, 2).backward()
    if clipped:
        optimizer.clip_grad_norm_(1e-3)
    assert model[0].weight.grad is not None
    change(model[0].weight.grad)
    with pytest.raises(GradientChanged, match=r"'0\.weight' was changed"):
        optimizer.step()
    optimizer.zero_grad()
    model(torch.full((1, 9), float("nan"), dtype=torch.float64)).sum().backward()  # which is never equal to itself
    optimizer.step()


class _Tied(torch.nn.Module):
    """Two parameters over one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (torch.nn.Linear(9, 9, dtype=torch.float64) for _ in range(2))
        self.second.weight = torch.nn.Parameter(self.first.weight.data)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.second(torch.tanh(self.first(x)))
        return hidden


@pytest.mark.parametrize("strategy", PACKAGES)
def test_two_parameters_over_one_memory(strategy: str) -> None:
    """Refused where they would be taken apart, or updated at different times; else as in one process."""
    torch.manual_seed(0)
    model = _Tied()
    inner = torch.optim.SGD(model.parameters(), 0.1)
    if strategy in (*SHARDED, "bytescheduler"):
        with pytest.raises(ValueError, match=r"'first\.weight' and 'second\.weight' are two tensors over one memory"):
            WRAP[strategy](inner, model)
        return
    optimizer = WRAP[strategy](inner, model)
    for step in range(3):
        optimizer.zero_grad()
        local_loss(model, step).backward()
        optimizer.step()
    assert torch.equal(model.first.weight, model.second.weight)


@pytest.mark.parametrize("strategy", SHARDED)
def test_parameters_in_shared_memory_are_told_of(strategy: str) -> None:
    model = torch.nn.Linear(9, 1).share_memory()
    with heard(logging.WARNING) as logged:
        WRAP[strategy](torch.optim.SGD(model.parameters(), 0.1), model)
    told = [text for text in logged if "share_memory" in text]
    assert len(told) == (1 if dear.rank() == 0 else 0)


@pytest.mark.parametrize("what", ["parameters", "gradients"])
@pytest.mark.parametrize("strategy", [*PACKAGES, "oss"])
def test_memory_that_moves_while_training(strategy: str, what: str) -> None:
    """``share_memory()``, or a queue between processes, moves all of a bucket, which its tensors follow."""
    width = 100 if strategy == "bytescheduler" else 300  # which here cuts a layer into partitions of a kilobyte

    def train(move: bool) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Linear(width, 7))
        optimizer: Any = WRAP[strategy](torch.optim.SGD(model.parameters(), 0.1), model)
        for step in range(6):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(10 * step + dear.rank())
            model(torch.randn(4, width, generator=generator)).square().mean().backward()
            if move and step in (1, 3) and what == "gradients":
                optimizer.synchronize()
                for param in model.parameters():
                    assert param.grad is not None
                    param.grad.share_memory_()
            optimizer.step()
            if move and step in (1, 3) and what == "parameters":
                model.share_memory()
        return [param.detach().clone() for param in model.parameters()]

    moved, stayed = train(True), train(False)
    if (
        dear.size() <= 2 or strategy != "mgwfbp"
    ):  # whose plan follows what it measures, and sums of more than two the plan
        assert all(torch.equal(one, other) for one, other in zip(moved, stayed, strict=True))
    torch.testing.assert_close(moved, stayed)


@pytest.mark.parametrize("strategy", PACKAGES)
def test_a_step_skipped_after_synchronize_where_all_gradients_are_sparse(strategy: str) -> None:
    model = torch.nn.Embedding(10, 4, sparse=True)
    optimizer: Any = WRAP[strategy](torch.optim.SparseAdam(model.parameters()), model)
    for step in range(4):
        optimizer.zero_grad()
        model(torch.tensor([dear.rank(), 2, 3])).sum().backward()
        if step == 2:
            optimizer.synchronize()
            optimizer.zero_grad()
        else:
            optimizer.step()
    values = dear.allgather_object(model.weight.detach())
    assert all(torch.equal(value, values[0]) for value in values)
