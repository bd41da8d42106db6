"""ACCO is equal to a simulation of all workers in one process, with one optimizer over whole parameters."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import nn

import co2
from tests.spmd.co2_simulated_rules import Halves
from tests.spmd.co2_training import (
    DOUBLE,
    adamw,
    add_and_train,
    assert_equal,
    assert_same,
    equal_everywhere,
    loss_of,
    momentum_sgd,
    sgd,
    small_model,
    train_steps,
    wrapped,
)
from tests.spmd.listening import heard


def _acco(make: Any = momentum_sgd, **options: Any) -> tuple[nn.Sequential, Any]:
    return wrapped(make, outer="acco", **options)


@pytest.mark.parametrize("frequency", ["auto", 3])
@pytest.mark.parametrize("make", [momentum_sgd, adamw])
def test_equals_its_equations_on_one_process(make: Any, frequency: int | str) -> None:
    model, optimizer = _acco(make, outer_frequency=frequency)
    simulation = Halves(make, 1 if frequency == "auto" else int(frequency))
    for step in range(13):
        train_steps(model, optimizer, range(step, step + 1))
        simulation.step(step)
        assert_same(model, simulation.model, measured_gap=False)
    assert equal_everywhere(model)


@pytest.mark.filterwarnings("ignore:Detected call of")  # of the simulation's optimizer, which steps seldom
def test_skipped_steps_add_no_gradients_and_rates_are_of_the_round() -> None:
    model, optimizer = _acco(sgd, outer_frequency=2)
    simulation = Halves(sgd, 2)
    schedules = [torch.optim.lr_scheduler.StepLR(one, 1, 0.9) for one in (optimizer, simulation.optimizer)]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(9):
        skips = (1,) if step in (1, 4) and co2.size() > 1 else ()
        optimizer.zero_grad()
        loss = loss_of(model, co2.rank(), step)
        scaler.scale(loss * float("inf") if co2.rank() in skips else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        simulation.step(step, skips)
        for schedule in schedules:
            schedule.step()
        assert_same(model, simulation.model, measured_gap=False)


@pytest.mark.parametrize("after", [1, 2, 3, 4])
def test_an_average_makes_the_update_that_is_not_made_yet(after: int) -> None:
    model, optimizer = _acco(outer_frequency=2)
    simulation = Halves(momentum_sgd, 2)
    for step in range(9):
        train_steps(model, optimizer, range(step, step + 1))
        simulation.step(step)
        if step + 1 == after:
            optimizer.average_parameters()
            simulation.average()
            optimizer.average_parameters()  # which has nothing to do
        assert_same(model, simulation.model, measured_gap=False)


def test_warm_up_is_synchronous_training() -> None:
    model, optimizer = _acco(adamw, warmup_steps=5)
    simulation = Halves(adamw, 9)
    for step in range(5):
        train_steps(model, optimizer, range(step, step + 1))
        simulation.step(step)
        simulation.average()
        assert_same(model, simulation.model, measured_gap=False)


def test_the_optimizers_state_is_in_its_usual_place() -> None:
    model, optimizer = _acco(adamw)
    train_steps(model, optimizer, range(4))
    optimizer.average_parameters()
    saved = optimizer.state_dict()
    assert not optimizer.state
    assert saved["state"][0]["exp_avg"].shape == model[0].weight.shape
    assert float(saved["state"][3]["step"]) == 2
    plain = adamw(model.parameters())
    plain.load_state_dict(saved)
    assert torch.equal(plain.state[model[2].bias]["exp_avg"], saved["state"][3]["exp_avg"])
    other, again = _acco(adamw)
    again.load_state_dict(plain.state_dict())  # without what is co2's: a batch begins
    other.load_state_dict(model.state_dict())
    train_steps(model, optimizer, range(4, 8))
    train_steps(other, again, range(4, 8))
    assert_equal(other, model)


def test_rank_0_alone_saves_while_others_go_on() -> None:
    model, optimizer = _acco(adamw)
    simulation = Halves(adamw, 1)
    saved = None
    for step in range(6):
        train_steps(model, optimizer, range(step, step + 1))
        if step <= 3:
            simulation.step(step)
        if step == 3 and co2.rank() == 0:
            saved = optimizer.state_dict()
    if saved is not None:
        for number, param in enumerate(simulation.exact.parameters()):
            torch.testing.assert_close(saved["co2"]["parameters"][number]["start"], param.detach(), rtol=0, atol=1e-12)
            wanted = simulation.optimizer.state[param]["exp_avg_sq"]
            torch.testing.assert_close(saved["state"][number]["exp_avg_sq"], wanted, rtol=0, atol=1e-12)


def test_frozen_layers_stay_and_unused_ones_do_not_decay() -> None:
    model, optimizer = _acco()
    train_steps(model, optimizer, range(3))
    model[0].requires_grad_(False)
    train_steps(model, optimizer, range(3, 5))  # takes over what was on its way
    held = [value.clone() for value in model[0].parameters()]
    train_steps(model, optimizer, range(5, 9))
    optimizer.average_parameters()
    assert all(torch.equal(value, kept) for value, kept in zip(model[0].parameters(), held, strict=True))
    with torch.no_grad():
        model[0].weight.fill_(0.25)
    train_steps(model, optimizer, range(9, 12))
    assert (model[0].weight == 0.25).all()
    model[0].requires_grad_(True)
    train_steps(model, optimizer, range(12, 16))
    assert not torch.equal(model[0].weight, held[0])
    assert (model[0].weight - 0.25).abs().max() < 0.2, "it goes on from what the script wrote"
    assert equal_everywhere(model)
    optimizer.average_parameters()
    before = [value.clone() for value in model[2].parameters()]
    for step in range(4):
        optimizer.zero_grad()
        (model[0](torch.full((2, model[0].in_features), float(step), dtype=DOUBLE))).sum().backward()
        optimizer.step()
    assert all(torch.equal(value, kept) for value, kept in zip(model[2].parameters(), before, strict=True))


def test_the_first_half_of_a_part_that_is_frozen_before_the_second_is_dropped() -> None:
    def first_half() -> bool:
        return bool(optimizer.state_dict()["co2"]["parameters"][0]["first"].any())

    model, optimizer = _acco()
    model[2].requires_grad_(False)
    train_steps(model, optimizer, range(1))
    model[2].requires_grad_(True)
    train_steps(model, optimizer, range(1, 3))
    assert len(optimizer.rounds.parts) == 2
    assert first_half()
    model[0].requires_grad_(False)
    train_steps(model, optimizer, range(3, 4))
    assert not first_half()


def test_a_gradient_that_is_left_on_a_frozen_parameter_is_not_added_again() -> None:
    """Where it was trained earlier in the round."""

    def train(leave: bool) -> list[nn.Parameter]:
        model, optimizer = _acco(outer_frequency=2)
        train_steps(model, optimizer, range(1))
        left = [param.grad for param in model[0].parameters()]
        model[0].requires_grad_(False)
        optimizer.zero_grad()
        loss_of(model, co2.rank(), 1).backward()
        if leave:
            for param, gradient in zip(model[0].parameters(), left, strict=True):
                param.grad = gradient
        optimizer.step()
        train_steps(model, optimizer, range(2, 6))
        return list(model.parameters())

    for value, wanted in zip(train(True), train(False), strict=True):
        assert torch.equal(value, wanted)


def test_groups_average_gradients_among_themselves_first() -> None:
    if co2.size() % 2:
        return
    model, optimizer = _acco(nprocs_per_node=2)
    simulation = Halves(momentum_sgd, 1)
    for step in range(7):
        train_steps(model, optimizer, range(step, step + 1))
        simulation.step(step)
    assert_equal(model, simulation.model, 1e-12)


def test_parameters_of_16_bits_have_exact_values_in_shards() -> None:
    model = small_model(torch.bfloat16)
    optimizer = co2.DistributedOptimizer(adamw(model.parameters()), model, outer="acco")
    for step in range(8):
        optimizer.zero_grad()
        loss_of(model, co2.rank(), step, torch.bfloat16).backward()
        optimizer.step()
    assert all(part.start.dtype is torch.float32 for part in optimizer.rounds.parts)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    other = small_model(torch.bfloat16)
    resumed = co2.DistributedOptimizer(adamw(other.parameters()), other, outer="acco")
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    assert saved[1]["state"][0]["exp_avg"].dtype is torch.float32
    for step in range(8, 12):
        for one, its in ((model, optimizer), (other, resumed)):
            its.zero_grad()
            loss_of(one, co2.rank(), step, torch.bfloat16).backward()
            its.step()
    assert_equal(other, model)
    assert equal_everywhere(model)


def test_added_parameters_are_trained_too() -> None:
    model, optimizer = _acco()
    train_steps(model, optimizer, range(3))
    extra = add_and_train(model, optimizer, range(3, 8))
    assert len({tuple(values) for values in co2.allgather_object(extra.tolist())}) == 1
    assert extra.tolist()[0] < 0


def test_what_is_written_to_parameters_is_told_once() -> None:
    model, optimizer = _acco()
    with heard(logging.WARNING) as said:
        train_steps(model, optimizer, range(4))
        assert not any("written" in message for message in said)
        for step in (4, 5):
            with torch.no_grad():
                model[0].weight.clamp_(-0.1, 0.1)
            train_steps(model, optimizer, range(step, step + 1))
    assert [message for message in said if "written" in message] == [
        "co2: something was written to parameter '0.weight' between steps. With outer='acco' parameters become what the "
        "optimizer makes of exact ones that ranks have shards of, so it is replaced when the next round arrives"
    ]


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="outer='acco' updates shards of parameters, and LBFGS is not known to update"):
        _acco(lambda params: torch.optim.LBFGS(params))
    with pytest.raises(ValueError, match=r"outer_lr=0\.5: outer='acco' takes no options of its own"):
        _acco(outer_lr=0.5)
    param = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"outer='acco' trains real parameters, and 'p' is torch\.complex64"):
        co2.DistributedOptimizer(sgd([param]), [("p", param)], outer="acco")
