"""Outer rules beside co2's own are equal to a simulation of all workers in one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import co2
from co2.communication import RoundThread
from tests.spmd.co2_simulation import Simulation, _mean_of
from tests.spmd.co2_training import (
    _adamw,
    _equal,
    _everywhere,
    _loss,
    _model,
    _momentum,
    _resumes,
    _same,
    _sgd,
    _steps,
    _wrapped,
)


class Waiting(Simulation):
    """Rules that wait: x and m are the same for all workers."""

    def __init__(self, rule: str, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.rule, self.rates = rule, list[float]()

    def step(self, *arguments: Any, **options: Any) -> None:
        self.rates.append(self.workers[0][1].param_groups[0]["lr"])
        super().step(*arguments, **options)

    def turn(self) -> None:
        moved = [x - a for x, a in zip(self.start, self._mean(), strict=True)]
        if self.rule == "localsgd":
            self.start = self._mean()
        elif self.rule == "slowmo":
            gamma = sum(self.rates) / len(self.rates)
            self.m = [self.beta * m + d / gamma for m, d in zip(self.m, moved, strict=True)]
            self.start = [x - self.lr * gamma * m for x, m in zip(self.start, self.m, strict=True)]
        else:
            self.m = [self.beta * m + d for m, d in zip(self.m, moved, strict=True)]
            steps = [d + self.beta * m for d, m in zip(moved, self.m, strict=True)]
            self.start = [x - self.lr * step for x, step in zip(self.start, steps, strict=True)]
        self.next = list(self.start)
        self._set(self.start)
        self.in_round, self.rates = 0, []

    def average(self) -> None:
        super().average()
        self.rates = []


class Eagerly(Simulation):
    """Each worker has an x and an m of its own."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        zeros = [torch.zeros_like(value) for value in self.start]
        self.x = [list(self.start) for _ in self._all]
        self.own, self.momenta = [zeros for _ in self._all], [zeros for _ in self._all]
        self.arrived = zeros
        self.weight, self.left = 0.0, len(self.workers)

    def turn(self) -> None:
        progress = [[x - y for x, y in zip(self.x[worker], self._values(worker), strict=True)] for worker in self._all]
        weight = 1 / (self.left if self.joined else len(self.workers))  # who is left is known a round late
        for worker in self._all:
            pairs = zip(progress[worker], self.own[worker], self.arrived, strict=True)
            gradients = [weight * d + (a - self.weight * before) for d, before, a in pairs]
            self.momenta[worker] = [self.beta * m + g for m, g in zip(self.momenta[worker], gradients, strict=True)]
            steps = [g + self.beta * m for g, m in zip(gradients, self.momenta[worker], strict=True)]
            self.x[worker] = [x - self.lr * step for x, step in zip(self.x[worker], steps, strict=True)]
            with torch.no_grad():
                for param, value in zip(self.workers[worker][0].parameters(), self.x[worker], strict=True):
                    param.copy_(value)
        left = self._left(self.counted)
        self.own, self.weight, self.left = progress, weight, len(left)
        self.arrived = _mean_of([progress[worker] for worker in left])
        self.in_round = 0

    def average(self) -> None:
        """What would arrive late counts before, as part of the last outer step."""
        for worker in self._all:
            late = [a - self.weight * before for before, a in zip(self.own[worker], self.arrived, strict=True)]
            self.momenta[worker] = [m + g for m, g in zip(self.momenta[worker], late, strict=True)]
            with torch.no_grad():
                for param, g in zip(self.workers[worker][0].parameters(), late, strict=True):
                    param -= self.lr * (1 + self.beta) * g
        self._set(self._mean())
        self.x = [self._values(worker) for worker in self._all]
        zeros = [torch.zeros_like(value) for value in self.start]
        self.own, self.arrived, self.in_round = [zeros for _ in self._all], zeros, 0
        self.counted = list(self.steps_of)


RULES = {"localsgd": (1.0, 0.0), "slowmo": (1.0, 0.5), "diloco": (0.7, 0.9), "eager": (0.4, 0.9)}


def _simulation(rule: str, make: Any, workers: int) -> Simulation:
    lr, momentum = RULES[rule]
    options = {"frequency": 3, "lr": lr, "momentum": momentum}
    if rule == "eager":
        return Eagerly(_model(), make, workers, **options)
    return Waiting(rule, _model(), make, workers, **options)


@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize(("make", "inner_lr"), [(_momentum, 0.1), (_adamw, 0.01)], ids=["sgd", "adamw"])
def test_equals_its_equations_on_one_process(rule: str, make: Any, inner_lr: float) -> None:
    model, optimizer = _wrapped(make, outer=rule, outer_frequency=3)
    simulation = _simulation(rule, make, co2.size())
    for step in range(17):
        rate = inner_lr * 0.9**step  # as a scheduler has it
        for each in (optimizer, *(one for _, one in simulation.workers)):
            each.param_groups[0]["lr"] = rate
        _steps(model, optimizer, range(step, step + 1))
        simulation.step(lambda m, worker, step=step: _loss(m, worker, step))
        if step == 9:  # one step into a round
            optimizer.average_parameters()
            simulation.average()
            assert _everywhere(model)
        _same(model, simulation.workers[co2.rank()][0])
        assert rule == "eager" or simulation.in_round > 0 or _everywhere(model)


@pytest.mark.parametrize("rule", ["diloco", "eager"])
def test_a_group_is_one_worker(rule: str) -> None:
    if co2.size() % 2:
        return
    model, optimizer = _wrapped(_sgd, outer=rule, outer_frequency=3, nprocs_per_node=2)
    simulation = _simulation(rule, _sgd, co2.size() // 2)
    for step in range(8):
        _steps(model, optimizer, range(step, step + 1))
        simulation.step(lambda m, worker, step=step: sum(_loss(m, 2 * worker + i, step) for i in (0, 1)) / 2)
    mine = simulation.workers[co2.rank() // 2][0]
    _equal(model, mine, 1e-12)


@pytest.mark.parametrize("rule", list(RULES))
def test_a_frozen_layer_rests_and_resumes_bit_for_bit(rule: str) -> None:
    """It takes over what is on its way, and moves no more until it is trained again."""
    model, optimizer = _wrapped(outer=rule, outer_frequency=3)
    _steps(model, optimizer, range(6))
    model[0].requires_grad_(False)
    _steps(model, optimizer, range(6, 10))
    frozen = [value.clone() for value in model[0].parameters()]
    assert len(set(co2.allgather_object(frozen[0].sum().item()))) == 1 or rule == "eager"
    _steps(model, optimizer, range(10, 14))
    assert all(torch.equal(value, kept) for value, kept in zip(model[0].parameters(), frozen, strict=True))
    outer = optimizer.state_dict()["co2"]["parameters"]
    assert not outer[0]["momentum"].any()
    assert outer[2]["momentum"].any() != (rule == "localsgd")

    def train(model: torch.nn.Sequential, optimizer: Any, steps: range) -> None:
        model[0].requires_grad_(True)
        _steps(model, optimizer, steps)

    _resumes(lambda: _wrapped(outer=rule, outer_frequency=3), (model, optimizer), range(14, 22), train=train)
    assert not torch.equal(model[0].weight, frozen[0])


WAITED: list[dict[str, Any]] = [{"outer": "localsgd"}, {"outer": "streaming-diloco", "overlap_steps": 0}]


@pytest.mark.parametrize("rule", WAITED, ids=["localsgd", "streaming-diloco"])
def test_where_a_wait_was_interrupted_the_next_step_begins_with_what_it_waited_for(rule: dict[str, Any]) -> None:
    def interrupted(_thread: RoundThread) -> None:
        raise KeyboardInterrupt

    model, optimizer = _wrapped(_sgd, **rule, outer_frequency=2)
    expected, other = _wrapped(_sgd, **rule, outer_frequency=2)
    _steps(expected, other, range(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RoundThread, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            _steps(model, optimizer, range(2))
    optimizer.zero_grad()
    sum(param.sum() for param in model.parameters()).backward()  # the same wherever parameters are
    optimizer.step()
    for value, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(value.detach(), wanted.detach() - 0.1, rtol=0, atol=1e-14)
    assert optimizer.local_steps == 1


def test_muon_may_be_the_inner_optimizer() -> None:
    """MuLoCo: its matrices, and nothing else."""
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")

    def muon(params: Any) -> torch.optim.Optimizer:
        return torch.optim.Muon([param for param in params if param.ndim == 2], lr=0.02)

    model, optimizer = _wrapped(muon, outer="diloco", outer_frequency=3)
    simulation = Waiting("diloco", _model(), muon, co2.size(), frequency=3, lr=0.7, momentum=0.9)
    for step in range(7):
        _steps(model, optimizer, range(step, step + 1))
        simulation.step(lambda m, worker, step=step: _loss(m, worker, step))
    _same(model, simulation.workers[co2.rank()][0])


CYCLIC = [0.1, 0.1, 0.1, 1e-4, 0.1, 0.1, 0.1, 0.1]


def test_slowmos_learning_rate_is_the_mean_of_the_round_also_where_training_resumes_inside_it() -> None:
    """In units of the last step's, 1e-4, a round would leave a momentum that is a thousand times too large for the next."""
    model, optimizer = _wrapped(_sgd, outer="slowmo", outer_frequency=4)
    simulation = Waiting("slowmo", _model(), _sgd, co2.size(), frequency=4, lr=1.0, momentum=0.5)
    for step in range(24):
        if step == 10:  # two steps into a round
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            model, optimizer = _wrapped(_sgd, outer="slowmo", outer_frequency=4)
            optimizer.load_state_dict(saved[1])
            model.load_state_dict(saved[0])
        for each in (optimizer, *(one for _, one in simulation.workers)):
            each.param_groups[0]["lr"] = CYCLIC[step % 8]
        _steps(model, optimizer, range(step, step + 1))
        simulation.step(lambda m, worker, step=step: _loss(m, worker, step))
        _same(model, simulation.workers[co2.rank()][0])
    assert all(value.abs().max() < 10 for value in model.parameters())


def test_slowmo_keeps_what_was_learned_before_the_learning_rate_came_to_0() -> None:
    """A round of a linear schedule that ends with it, and the next one, in which only a script's own write counts."""
    model, optimizer = _wrapped(_sgd, outer="slowmo", outer_frequency=12)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=11)
    before = [value.clone() for value in model.parameters()]
    simulation = Waiting("localsgd", _model(), _sgd, co2.size(), frequency=12)
    schedules = [torch.optim.lr_scheduler.LinearLR(one, 1.0, 0.0, total_iters=11) for _, one in simulation.workers]
    for step in range(12):
        _steps(model, optimizer, range(step, step + 1))
        simulation.step(lambda m, worker, step=step: _loss(m, worker, step))
        for each in (schedule, *schedules):
            each.step()
    assert optimizer.param_groups[0]["lr"] == 0
    _same(model, simulation.workers[0][0])  # of a first round, SlowMo is the mean
    assert not any(torch.equal(value, start) for value, start in zip(model.parameters(), before, strict=True))
    with torch.no_grad():
        model[0].weight += 1 + co2.rank()
    wanted = model[0].weight.detach().mean() + (co2.size() - 1) / 2 - co2.rank()
    _steps(model, optimizer, range(12, 24))
    torch.testing.assert_close(model[0].weight.detach().mean(), wanted)
