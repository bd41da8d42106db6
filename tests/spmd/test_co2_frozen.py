"""What a script writes to parameters that nobody trains, and what becomes of it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import co2
from overlap.transport.communicator import Communicator, Work
from tests.spmd.co2_training import FULL, equal_everywhere, resumes, small_model, train_steps, wrapped


def _freeze_and_write(layer: nn.Module, value: float) -> None:
    layer.requires_grad_(False)
    for param in layer.parameters():
        nn.init.constant_(param, value)


def _holds(layer: nn.Module, value: float) -> bool:
    return all(bool((param == value).all()) for param in layer.parameters())


@pytest.mark.parametrize("on_its_way", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_what_is_written_to_a_frozen_parameter_stays(on_its_way: bool, dtype: torch.dtype) -> None:
    model = small_model()
    if dtype is torch.bfloat16:
        model[0].bfloat16()
        model.register_forward_pre_hook(lambda _model, inputs: inputs[0].bfloat16())
        model[1].register_forward_hook(lambda _module, _inputs, output: output.double())
    optimizer = co2.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, outer_frequency=2, **FULL)
    train_steps(model, optimizer, range(4))
    if not on_its_way:
        optimizer.average_parameters()
    _freeze_and_write(model[0], 0.75)
    for step in range(4, 9):
        train_steps(model, optimizer, range(step, step + 1))
        assert _holds(model[0], 0.75), step
    _freeze_and_write(model[0], -0.375)  # later, with nothing on its way
    train_steps(model, optimizer, range(9, 12))
    assert _holds(model[0], -0.375)
    optimizer.average_parameters()
    assert _holds(model[0], -0.375)
    assert equal_everywhere(model)
    model[0].requires_grad_(True)
    train_steps(model, optimizer, range(12, 15))
    assert not _holds(model[0], -0.375)
    assert all(bool((param + 0.375).abs().lt(0.25).all()) for param in model[0].parameters()), "it goes on from there"
    optimizer.average_parameters()
    assert equal_everywhere(model)


def test_memory_that_is_put_in_place_of_a_frozen_parameters_own_stays() -> None:
    model, optimizer = wrapped(outer_frequency=2, **FULL)
    train_steps(model, optimizer, range(4))
    model[0].requires_grad_(False)
    for param in model[0].parameters():
        param.data = torch.full_like(param, 0.75)
    train_steps(model, optimizer, range(4, 7))
    assert _holds(model[0], 0.75)


def test_a_parameter_frozen_and_left_alone_takes_over_what_is_on_its_way() -> None:
    model, optimizer = wrapped(outer_frequency=2, **FULL)
    train_steps(model, optimizer, range(4))
    optimizer.rounds.arrive()
    wanted = optimizer.state_dict()["co2"]["parameters"][0]["next"]
    model[0].requires_grad_(False)
    train_steps(model, optimizer, range(4, 5))
    assert not torch.equal(model[0].weight, wanted)
    train_steps(model, optimizer, range(5, 6))
    assert torch.equal(model[0].weight, wanted)
    assert equal_everywhere(model[0])


def test_the_best_model_is_loaded_while_a_layer_is_frozen() -> None:
    model, optimizer = wrapped(outer_frequency=2, **FULL)
    train_steps(model, optimizer, range(4))
    optimizer.average_parameters()
    best = copy.deepcopy(model.state_dict())
    train_steps(model, optimizer, range(4, 8))
    optimizer.average_parameters()
    model[0].requires_grad_(False)
    train_steps(model, optimizer, range(8, 9))
    model.load_state_dict(best)
    optimizer.average_parameters()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, best[name], rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("how", ["copied", "through .data"])
def test_ranks_that_write_different_values_to_a_frozen_parameter_get_the_mean(how: str) -> None:
    model, optimizer = wrapped(outer_frequency=2, **FULL)
    train_steps(model, optimizer, range(4))
    model[0].requires_grad_(False)
    train_steps(model, optimizer, range(4, 7))
    mine = float(co2.rank() * 2)
    for param in model[0].parameters():
        param.data.fill_(mine) if how == "through .data" else nn.init.constant_(param, mine)
    train_steps(model, optimizer, range(7, 10))
    assert _holds(model[0], mine), "it is this rank's"
    optimizer.average_parameters()
    assert _holds(model[0], co2.size() - 1.0)
    if co2.rank() == 0:
        nn.init.constant_(model[0].bias, 50.0)  # one rank alone
    optimizer.average_parameters()
    mean = (50 + (co2.size() - 1) * (co2.size() - 1.0)) / co2.size()
    torch.testing.assert_close(model[0].bias.detach(), torch.full((16,), mean, dtype=torch.float64))
    assert equal_everywhere(model)


@pytest.mark.parametrize("how", ["copied", "through .data"])
def test_what_is_written_in_warm_up_stays(how: str) -> None:
    """Nothing is on its way after an average, however it is written."""
    model, optimizer = wrapped(outer_frequency=2, warmup_steps=3, **FULL)
    train_steps(model, optimizer, range(1))
    model[0].requires_grad_(False)
    for param in model[0].parameters():
        param.data.fill_(7.0) if how == "through .data" else nn.init.constant_(param, 7.0)
    train_steps(model, optimizer, range(1, 6))
    assert _holds(model[0], 7.0)


@pytest.mark.parametrize("outer", ["co2", "localsgd"])
def test_nothing_is_sent_of_a_part_that_is_frozen(outer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a round that nobody waits for, by one that all wait for, and by an average."""
    model, optimizer = wrapped(outer=outer, outer_frequency=1)
    for steps, frozen in (
        (range(2), 0),
        (range(2, 4), None),
        (range(4, 6), 2),
    ):  # so that layers are parts of their own
        for layer in (0, 2):
            model[layer].requires_grad_(layer != frozen)
        train_steps(model, optimizer, steps)
    assert len(optimizer.rounds.parts) == 2
    optimizer.rounds.arrive()
    sent: list[str] = []

    def note(_comm: Communicator, work: Work) -> Work:
        sent.append(work.label)
        return work

    monkeypatch.setattr(Communicator, "listener", note)
    for act in (lambda: train_steps(model, optimizer, range(6, 7)), optimizer.average_parameters):
        sent.clear()
        act()
        optimizer.rounds.arrive()
        assert [sent.count("co2 average"), sent.count("co2 gather")] == [1, 1]


@pytest.mark.parametrize("apart", [False, True])
def test_the_outer_momentum_of_a_frozen_parameter_is_forgotten(apart: bool) -> None:
    """Beside others that travel, or in a part of its own, which rests."""

    def moving() -> list[bool]:
        outer = optimizer.state_dict()["co2"]["parameters"]
        return [bool(outer[index]["momentum"].any()) for index in range(4)]

    model, optimizer = wrapped(outer_frequency=1, **FULL)
    if apart:
        model[0].requires_grad_(False)
        train_steps(model, optimizer, range(2))
        model[0].requires_grad_(True)
    train_steps(model, optimizer, range(2, 6))
    assert len(optimizer.rounds.parts) == 1 + apart
    assert moving() == [True] * 4
    model[0].requires_grad_(False)
    train_steps(model, optimizer, range(6, 9))
    assert moving() == [False, False, True, True]
    model[0].requires_grad_(True)
    before = copy.deepcopy(model[0].state_dict())
    for step in range(9, 12):  # it travels again, and has no gradient
        optimizer.zero_grad()
        model[2](torch.tanh(_inputs(step))).square().mean().backward()
        optimizer.step()
    for name, value in model[0].state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=1e-14, atol=1e-15)


def _inputs(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + co2.rank())
    return torch.randn(4, 16, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("steps", [4, 5, 6, 7])
def test_resumes_bit_for_bit_where_a_frozen_parameter_was_written_to(steps: int) -> None:
    model, optimizer = wrapped(outer_frequency=2, **FULL)
    train_steps(model, optimizer, range(4))
    _freeze_and_write(model[0], 7.0)
    train_steps(model, optimizer, range(4, steps))

    def wrap() -> tuple[nn.Sequential, Any]:
        other, resumed = wrapped(outer_frequency=2, **FULL)
        other[0].requires_grad_(False)
        return other, resumed

    _, other, _ = resumes(wrap, (model, optimizer), range(steps, 11))
    assert _holds(other[0], 7.0)


@pytest.mark.parametrize("steps", [5, 7, 8])
def test_resumes_bit_for_bit_where_layers_were_trained_at_different_times(steps: int) -> None:
    """The gap is measured over what travels, whatever was taken in with it and rests.

    What is frozen inside a round travels at its end.
    """

    def train(model: nn.Sequential, optimizer: Any, steps: range) -> None:
        for step in steps:
            model[2].requires_grad_(step >= 2)
            model[0].requires_grad_(step < 5)
            for group in optimizer.param_groups:
                group["lr"] = 0.5 if step < 4 else 0.01
            train_steps(model, optimizer, range(step, step + 1))

    model, optimizer = wrapped(outer_frequency=2, **FULL)
    train(model, optimizer, range(steps))
    resumes(lambda: wrapped(outer_frequency=2, **FULL), (model, optimizer), range(steps, 14), train=train)


def test_the_gap_is_the_same_however_parameters_were_taken_in() -> None:
    """Both layers at once, of which one rests later beside the other that travels; or each in a part of its own."""
    rule = {**FULL, "outer_clip": None}
    model, optimizer = wrapped(outer_frequency=1, **rule)
    train_steps(model, optimizer, range(4))
    weights, state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    ends = []
    for batches in ([[0, 1, 2, 3]], [[0, 1], [2, 3]]):
        other, resumed = wrapped(outer_frequency=1, **rule)
        other[0].requires_grad_(False)
        resumed.load_state_dict(copy.deepcopy({**state, "co2": {**state["co2"], "batches": batches}}))
        other.load_state_dict(weights)
        train_steps(other, resumed, range(4, 9))
        ends.append(list(other.parameters()))
    for value, wanted in zip(*ends, strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-12, atol=1e-13)
