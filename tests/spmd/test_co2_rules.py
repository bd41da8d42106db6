"""Outer rules beside co2's own are equal to a simulation of all workers in one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import co2
from tests.spmd.co2_simulation import Simulation
from tests.spmd.co2_training import _adamw, _everywhere, _loss, _model, _momentum, _same, _steps, _wrapped


@pytest.fixture(autouse=True)
def _session() -> None:
    co2.init()


class Waiting(Simulation):
    """Rules that wait: x and m are the same for all workers."""

    def __init__(self, rule: str, *arguments: Any, inner_lr: float, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.rule, self.inner_lr = rule, inner_lr

    def turn(self) -> None:
        moved = [x - a for x, a in zip(self.start, self._mean(), strict=True)]
        if self.rule == "localsgd":
            self.start = self._mean()
        elif self.rule == "slowmo":
            self.m = [self.beta * m + d / self.inner_lr for m, d in zip(self.m, moved, strict=True)]
            self.start = [x - self.lr * self.inner_lr * m for x, m in zip(self.start, self.m, strict=True)]
        else:
            self.m = [self.beta * m + d for m, d in zip(self.m, moved, strict=True)]
            steps = [d + self.beta * m for d, m in zip(moved, self.m, strict=True)]
            self.start = [x - self.lr * step for x, step in zip(self.start, steps, strict=True)]
        self.next = list(self.start)
        self._set(self.start)
        self.in_round = 0


class Eagerly(Simulation):
    """Each worker has an x and an m of its own."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        zeros = [torch.zeros_like(value) for value in self.start]
        self.x = [list(self.start) for _ in self._all]
        self.own, self.momenta = [zeros for _ in self._all], [zeros for _ in self._all]
        self.arrived = zeros

    def turn(self) -> None:
        progress = [[x - y for x, y in zip(self.x[worker], self._values(worker), strict=True)] for worker in self._all]
        weight = 1 / len(self.workers)
        for worker in self._all:
            pairs = zip(progress[worker], self.own[worker], self.arrived, strict=True)
            gradients = [weight * d + (a - weight * before) for d, before, a in pairs]
            self.momenta[worker] = [self.beta * m + g for m, g in zip(self.momenta[worker], gradients, strict=True)]
            steps = [g + self.beta * m for g, m in zip(gradients, self.momenta[worker], strict=True)]
            self.x[worker] = [x - self.lr * step for x, step in zip(self.x[worker], steps, strict=True)]
            with torch.no_grad():
                for param, value in zip(self.workers[worker][0].parameters(), self.x[worker], strict=True):
                    param.copy_(value)
        self.own = progress
        self.arrived = [sum(column[1:], column[0]) / len(column) for column in zip(*progress, strict=True)]
        self.in_round = 0


RULES = {"localsgd": (1.0, 0.0), "slowmo": (1.0, 0.5), "diloco": (0.7, 0.9), "eager": (0.4, 0.9)}


def _simulation(rule: str, make: Any, inner_lr: float) -> Simulation:
    lr, momentum = RULES[rule]
    options = {"frequency": 3, "lr": lr, "momentum": momentum}
    if rule == "eager":
        return Eagerly(_model(), make, co2.size(), **options)
    return Waiting(rule, _model(), make, co2.size(), inner_lr=inner_lr, **options)


@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize(("make", "inner_lr"), [(_momentum, 0.1), (_adamw, 0.01)], ids=["sgd", "adamw"])
def test_equals_its_equations_on_one_process(rule: str, make: Any, inner_lr: float) -> None:
    model, optimizer = _wrapped(make, outer=rule, outer_frequency=3)
    simulation = _simulation(rule, make, inner_lr)
    for step in range(11):
        _steps(model, optimizer, range(step, step + 1))
        simulation.step(lambda m, worker, step=step: _loss(m, worker, step))
        _same(model, simulation.workers[co2.rank()][0])
        assert rule == "eager" or step % 3 < 2 or _everywhere(model)
    optimizer.average_parameters()
    assert _everywhere(model)


def test_muon_may_be_the_inner_optimizer() -> None:
    """MuLoCo: its matrices, and nothing else."""
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")

    def muon(params: Any) -> torch.optim.Optimizer:
        return torch.optim.Muon([param for param in params if param.ndim == 2], lr=0.02)

    model, optimizer = _wrapped(muon, outer="diloco", outer_frequency=3)
    simulation = Waiting("diloco", _model(), muon, co2.size(), inner_lr=0.02, frequency=3, lr=0.7, momentum=0.9)
    for step in range(7):
        _steps(model, optimizer, range(step, step + 1))
        simulation.step(lambda m, worker, step=step: _loss(m, worker, step))
    _same(model, simulation.workers[co2.rank()][0])


@pytest.mark.parametrize("rule", list(RULES))
def test_resumes_bit_for_bit(rule: str) -> None:
    model, optimizer = _wrapped(_adamw, outer=rule, outer_frequency=3)
    _steps(model, optimizer, range(7))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    _steps(model, optimizer, range(7, 14))
    other, resumed = _wrapped(_adamw, outer=rule, outer_frequency=3)
    resumed.load_state_dict(saved[1])
    other.load_state_dict(saved[0])
    _steps(other, resumed, range(7, 14))
    for value, wanted in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(value, wanted)
    _, another = _wrapped(_adamw, outer_frequency=3)
    with pytest.raises(ValueError, match=f"was saved with outer='{rule}', and this optimizer has outer='co2'"):
        another.load_state_dict(saved[1])
