"""Outer rules beside co2's own are equal to a simulation of all workers in one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import co2
from co2.communication import RoundThread
from tests.spmd.co2_simulated_rules import RULES, Waiting, simulation_of
from tests.spmd.co2_training import (
    adamw,
    assert_equal,
    assert_same,
    equal_everywhere,
    loss_of,
    momentum_sgd,
    resumes,
    sgd,
    small_model,
    train_steps,
    wrapped,
)


@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize(("make", "inner_lr"), [(momentum_sgd, 0.1), (adamw, 0.01)], ids=["sgd", "adamw"])
def test_equals_its_equations_on_one_process(rule: str, make: Any, inner_lr: float) -> None:
    model, optimizer = wrapped(make, outer=rule, outer_frequency=3)
    simulation = simulation_of(rule, make, co2.size())
    for step in range(17):
        rate = inner_lr * 0.9**step  # as a scheduler has it
        for each in (optimizer, *(one for _, one in simulation.workers)):
            each.param_groups[0]["lr"] = rate
        train_steps(model, optimizer, range(step, step + 1))
        simulation.step(lambda m, worker, step=step: loss_of(m, worker, step))
        if step == 9:  # one step into a round
            optimizer.average_parameters()
            simulation.average()
            assert equal_everywhere(model)
        assert_same(model, simulation.workers[co2.rank()][0])
        assert rule == "eager" or simulation.in_round > 0 or equal_everywhere(model)


@pytest.mark.parametrize("rule", ["diloco", "eager"])
def test_a_group_is_one_worker(rule: str) -> None:
    if co2.size() % 2:
        return
    model, optimizer = wrapped(sgd, outer=rule, outer_frequency=3, nprocs_per_node=2)
    simulation = simulation_of(rule, sgd, co2.size() // 2)
    for step in range(8):
        train_steps(model, optimizer, range(step, step + 1))
        simulation.step(lambda m, worker, step=step: sum(loss_of(m, 2 * worker + i, step) for i in (0, 1)) / 2)
    mine = simulation.workers[co2.rank() // 2][0]
    assert_equal(model, mine, 1e-12)


@pytest.mark.parametrize("rule", list(RULES))
def test_a_frozen_layer_rests_and_resumes_bit_for_bit(rule: str) -> None:
    """It takes over what is on its way, and moves no more until it is trained again."""
    model, optimizer = wrapped(outer=rule, outer_frequency=3)
    train_steps(model, optimizer, range(6))
    model[0].requires_grad_(False)
    train_steps(model, optimizer, range(6, 10))
    frozen = [value.clone() for value in model[0].parameters()]
    assert len(set(co2.allgather_object(frozen[0].sum().item()))) == 1 or rule == "eager"
    train_steps(model, optimizer, range(10, 14))
    assert all(torch.equal(value, kept) for value, kept in zip(model[0].parameters(), frozen, strict=True))
    outer = optimizer.state_dict()["co2"]["parameters"]
    assert not outer[0]["momentum"].any()
    assert outer[2]["momentum"].any() != (rule == "localsgd")

    def train(model: torch.nn.Sequential, optimizer: Any, steps: range) -> None:
        model[0].requires_grad_(True)
        train_steps(model, optimizer, steps)

    resumes(lambda: wrapped(outer=rule, outer_frequency=3), (model, optimizer), range(14, 22), train=train)
    assert not torch.equal(model[0].weight, frozen[0])


WAITED: list[dict[str, Any]] = [{"outer": "localsgd"}, {"outer": "streaming-diloco", "overlap_steps": 0}]


@pytest.mark.parametrize("rule", WAITED, ids=["localsgd", "streaming-diloco"])
def test_where_a_wait_was_interrupted_the_next_step_begins_with_what_it_waited_for(rule: dict[str, Any]) -> None:
    def interrupted(_thread: RoundThread) -> None:
        raise KeyboardInterrupt

    model, optimizer = wrapped(sgd, **rule, outer_frequency=2)
    expected, other = wrapped(sgd, **rule, outer_frequency=2)
    train_steps(expected, other, range(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RoundThread, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train_steps(model, optimizer, range(2))
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

    model, optimizer = wrapped(muon, outer="diloco", outer_frequency=3)
    simulation = Waiting("diloco", small_model(), muon, co2.size(), frequency=3, lr=0.7, momentum=0.9)
    for step in range(7):
        train_steps(model, optimizer, range(step, step + 1))
        simulation.step(lambda m, worker, step=step: loss_of(m, worker, step))
    assert_same(model, simulation.workers[co2.rank()][0])


CYCLIC = [0.1, 0.1, 0.1, 1e-4, 0.1, 0.1, 0.1, 0.1]


def test_slowmos_learning_rate_is_the_mean_of_the_round_also_where_training_resumes_inside_it() -> None:
    """In units of the last step's, 1e-4, a round would leave a momentum that is a thousand times too large for the next."""
    model, optimizer = wrapped(sgd, outer="slowmo", outer_frequency=4)
    simulation = Waiting("slowmo", small_model(), sgd, co2.size(), frequency=4, lr=1.0, momentum=0.5)
    for step in range(24):
        if step == 10:  # two steps into a round
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            model, optimizer = wrapped(sgd, outer="slowmo", outer_frequency=4)
            optimizer.load_state_dict(saved[1])
            model.load_state_dict(saved[0])
        for each in (optimizer, *(one for _, one in simulation.workers)):
            each.param_groups[0]["lr"] = CYCLIC[step % 8]
        train_steps(model, optimizer, range(step, step + 1))
        simulation.step(lambda m, worker, step=step: loss_of(m, worker, step))
        assert_same(model, simulation.workers[co2.rank()][0])
    assert all(value.abs().max() < 10 for value in model.parameters())


def test_slowmo_keeps_what_was_learned_before_the_learning_rate_came_to_0() -> None:
    """A round of a linear schedule that ends with it, and the next one, in which only a script's own write counts."""
    model, optimizer = wrapped(sgd, outer="slowmo", outer_frequency=12)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=11)
    before = [value.clone() for value in model.parameters()]
    simulation = Waiting("localsgd", small_model(), sgd, co2.size(), frequency=12)
    schedules = [torch.optim.lr_scheduler.LinearLR(one, 1.0, 0.0, total_iters=11) for _, one in simulation.workers]
    for step in range(12):
        train_steps(model, optimizer, range(step, step + 1))
        simulation.step(lambda m, worker, step=step: loss_of(m, worker, step))
        for each in (schedule, *schedules):
            each.step()
    assert optimizer.param_groups[0]["lr"] == 0
    assert_same(model, simulation.workers[0][0])  # of a first round, SlowMo is the mean
    assert not any(torch.equal(value, start) for value, start in zip(model.parameters(), before, strict=True))
    with torch.no_grad():
        model[0].weight += 1 + co2.rank()
    wanted = model[0].weight.detach().mean() + (co2.size() - 1) / 2 - co2.rank()
    train_steps(model, optimizer, range(12, 24))
    torch.testing.assert_close(model[0].weight.detach().mean(), wanted)
