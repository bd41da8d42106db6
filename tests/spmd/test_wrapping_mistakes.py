"""What does not belong together is refused when it is wrapped, with the remedy; what is lost is said."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import dear
import oss
import wfbp
from overlap.core.round import GradientChanged
from tests.spmd.listening import heard


class LionLike(torch.optim.Optimizer):
    """An optimizer of somebody else's, whose rule nobody knows."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad.sign(), alpha=group["lr"])


class OurAdamW(torch.optim.AdamW):
    """The same under another name."""


@pytest.mark.parametrize("package", [dear, wfbp, oss])
def test_an_optimizer_of_another_model_is_refused(package: Any) -> None:
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    with pytest.raises(ValueError, match=r"none of the optimizer's 2 parameters is one of the 2 of the Linear"):
        package.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), other)
    with pytest.raises(ValueError, match="converted or copied in between"):
        package.DistributedOptimizer(torch.optim.SGD(nn.Linear(3, 2).parameters(), 0.1), model)


def test_an_optimizer_may_hold_some_of_the_model_and_more() -> None:
    model, head = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), nn.Linear(2, 1)
    optimizer = dear.DistributedOptimizer(torch.optim.SGD([*model[1].parameters(), *head.parameters()], 0.1), model)
    head(model(torch.ones(2, 3))).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("where", ["outside", "inside"])
def test_a_model_in_data_parallel_is_refused(where: str) -> None:
    inner = nn.DataParallel(nn.Linear(3, 2))
    model = inner if where == "outside" else nn.Sequential(inner)
    with pytest.raises(TypeError, match=r"one process per device.*model\.module.*dearrun -np N"):
        dear.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model)


@pytest.fixture
def wrapped(monkeypatch: pytest.MonkeyPatch) -> type[nn.Module]:
    """What stands for DistributedDataParallel."""

    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    monkeypatch.setattr(torch.nn.parallel, "DistributedDataParallel", Wrapper)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    return Wrapper


@pytest.mark.parametrize("given", ["the wrapper", "the model", "parameters"])
def test_a_model_in_distributed_data_parallel_is_refused(given: str, wrapped: type[nn.Module]) -> None:
    """Both would average. Whatever of it a script hands over, the wrapper around it is found."""
    model = nn.Linear(3, 2)
    wrapper = wrapped(model)
    second = {"the wrapper": wrapper, "the model": model, "parameters": None}[given]
    with pytest.raises(TypeError, match=r"averages its gradients already.*model\.module"):
        dear.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), second)


def test_who_wraps_the_model_afterwards_is_told_what_has_changed_its_gradients(wrapped: type[nn.Module]) -> None:
    """As Hugging Face's Trainer does with an optimizer that was distributed by hand."""
    model = nn.Linear(3, 2)
    optimizer = dear.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model)
    wrapper = wrapped(model)
    wrapper.module(torch.ones(2, 3)).sum().backward()
    for parameter in model.parameters():
        parameter.grad.div_(2)
    with pytest.raises(
        GradientChanged, match=r"averages its gradients already.*DearTrainer.*dear\.integrations\.accelerate"
    ):
        optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("kind", "promise", "told"),
    [
        (LionLike, {}, True),
        (LionLike, {"elementwise": True}, False),
        (OurAdamW, {}, False),
        (torch.optim.LBFGS, {}, True),
    ],
)
def test_state_that_stays_whole_is_said_with_the_promise_that_splits_it(
    kind: Any, promise: dict[str, bool], told: bool
) -> None:
    model = nn.Linear(3, 2)
    with heard(logging.WARNING) as said:
        optimizer = dear.DistributedOptimizer(kind(model.parameters()), model, **promise)
    line = (
        f"{kind.__name__} is not known to update each element from its own gradient and state alone (elementwise=True"
    )
    assert any(line in text for text in said) is (told and dear.rank() == 0)
    if kind is not torch.optim.LBFGS:
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        assert all(bucket.sharded is not told for bucket in optimizer.buckets)
