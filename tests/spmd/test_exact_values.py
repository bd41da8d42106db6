"""Parameters that travel in 16 bits: ranks see rounded values and owners keep exact ones, whatever comes between steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import dear
import oss

FP16 = torch.float16
_STEPS = 6


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))


def _backward(module: nn.Module) -> None:
    """The same gradients on all ranks, so that averages are those of one process in every bit."""
    (module(torch.ones(4, 8)).square().sum() / 64).backward()


@dataclass
class Run:
    """A model in training; `forward` computes with it."""

    model: nn.Sequential
    forward: nn.Module
    optimizer: Any

    def saved(self) -> dict[str, Any]:
        options = {"all_ranks": True} if isinstance(self.optimizer, oss.OSS) else {}
        return self.optimizer.state_dict(**options)


def _alone(momentum: float) -> Run:
    model = _model()
    parameters = model.parameters()
    return Run(model, model, oss.OSS(parameters, torch.optim.SGD, lr=1e-5, momentum=momentum, broadcast_fp16=True))


def _take_over(run: Run) -> None:
    if isinstance(run.optimizer, oss.OSS) and run.forward is run.model:
        run.forward = oss.ShardedDataParallel(run.model, run.optimizer)


def _sharded(momentum: float) -> Run:
    run = _alone(momentum)
    _take_over(run)
    return run


def _wrapped(package: Any, momentum: float) -> Run:
    model = _model()
    plain = torch.optim.SGD(model.parameters(), lr=1e-5, momentum=momentum)
    return Run(model, model, package.DistributedOptimizer(plain, model, gather_dtype=FP16))


WAYS: dict[str, Callable[[float], Run]] = {
    "OSS": _alone,
    "ShardedDataParallel": _sharded,
    "oss": lambda momentum: _wrapped(oss, momentum),
    "dear": lambda momentum: _wrapped(dear, momentum),
}


class _OneProcess:
    """SGD that updates exact values and lets forward see them rounded."""

    def __init__(self, model: nn.Module, momentum: float) -> None:
        self._parameters = list(model.parameters())
        self._optimizer = torch.optim.SGD(self._parameters, lr=1e-5, momentum=momentum)
        self.exact = [parameter.detach().clone() for parameter in self._parameters]

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()

    @torch.no_grad()
    def step(self) -> None:
        trained = [n for n, parameter in enumerate(self._parameters) if parameter.grad is not None]
        for n in trained:
            exact, parameter = self.exact[n], self._parameters[n]
            parameter.copy_(torch.where(exact.half() == parameter, exact, parameter))
        self._optimizer.step()
        for n in trained:
            self.exact[n] = self._parameters[n].detach().clone()
            self._parameters[n].copy_(self.exact[n].half())


def _freeze(run: Run) -> None:
    run.model[1].requires_grad_(False)


def _thaw(run: Run) -> None:
    run.model[1].requires_grad_(True)


def _reload(run: Run) -> None:
    if not isinstance(run.optimizer, _OneProcess):
        run.optimizer.load_state_dict(run.saved())


@torch.no_grad()
def _write(run: Run) -> None:
    run.model[1].weight[0, 0] = 0.3


EVENTS: dict[str, dict[int, Callable[[Run], None]]] = {
    "another class takes over": {3: _take_over},
    "frozen": {2: _freeze},
    "frozen and trained again": {2: _freeze, 4: _thaw},
    "frozen until then": {0: _freeze, 3: _thaw},
    "loaded": {3: _reload},
    "loaded while frozen": {2: _freeze, 3: _reload, 4: _thaw},
    "taken over while frozen": {2: _freeze, 3: _take_over, 4: _thaw},
    "written": {3: _write},
}


WITHOUT_STATE = [(way, events, 0.0) for way in WAYS for events in EVENTS]
WITH_MOMENTUM = [("OSS", events, 0.5) for events in ("another class takes over", "frozen and trained again", "loaded")]


@pytest.mark.parametrize(("way", "events", "momentum"), WITHOUT_STATE + WITH_MOMENTUM)
def test_exact_values_outlast_what_comes_between_steps(way: str, events: str, momentum: float) -> None:
    run, reference = WAYS[way](momentum), _model()
    one = _OneProcess(reference, momentum)
    for step in range(_STEPS):
        for each in (run, Run(reference, reference, one)):
            EVENTS[events].get(step, lambda _: None)(each)
            each.optimizer.zero_grad()
            _backward(each.forward)
            each.optimizer.step()
        seen = nn.utils.parameters_to_vector(run.model.parameters()).detach()
        assert torch.equal(seen, nn.utils.parameters_to_vector(reference.parameters())), f"step {step}"
    masters = run.saved()["master"]
    for number, exact in enumerate(one.exact):
        assert number not in masters or torch.equal(masters[number].view_as(exact), exact), f"parameter {number}"
    missing = [number for number in range(len(one.exact)) if number not in masters]
    assert all(torch.equal(one.exact[number], one.exact[number].half().float()) for number in missing)
