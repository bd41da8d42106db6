"""Averages that are infinite or NaN: said on all ranks, or left out on all; a GradScaler goes by its own look."""

from __future__ import annotations

import contextlib
import logging
import math
from typing import Any

import pytest
import torch
from torch import nn

import co2
import dear
from overlap.core.closing import OtherRankFailed
from overlap.features.nonfinite import NonfiniteGradient
from tests.spmd.listening import heard
from tests.spmd.strategies import PACKAGES, WRAP
from tests.spmd.training import same_everywhere

WAYS = [*PACKAGES, "dear", "dear-rb", "dear-whole"]
RAISED = (NonfiniteGradient, OtherRankFailed)


def _model() -> nn.Sequential:
    torch.default_generator.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def _loss(model: nn.Module, step: int, by: float = 1.0, only: str = "") -> torch.Tensor:
    """Of this rank's data. On the last rank the gradient of the first element of `only`, or all of them, are spoiled."""
    generator = torch.Generator().manual_seed(10 * step + dear.rank())
    loss = model(torch.randn(4, 6, generator=generator, dtype=torch.float64)).square().mean()
    if dear.rank() < dear.size() - 1 or by == 1:
        return loss
    return loss + model.get_parameter(only).reshape(-1)[-1] * by if only else loss * by


def _step(model: nn.Module, optimizer: Any, step: int, by: float = 1.0, only: str = "") -> None:
    optimizer.zero_grad()
    _loss(model, step, by, only).backward()
    optimizer.step()


@pytest.mark.parametrize("by", [math.nan, math.inf])
@pytest.mark.parametrize("strategy", [*WAYS, "dear-eager"])
def test_all_ranks_raise_in_the_next_step_with_the_name_and_the_step(strategy: str, by: float) -> None:
    """One element of one rank is enough, whichever rank looks at it. What is raised once is not raised again."""
    model = _model()
    optimizer = WRAP[strategy](torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), model)
    for step in range(2):
        _step(model, optimizer, step)
    _step(model, optimizer, 2, by, "2.bias")
    model.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()})
    optimizer.zero_grad()
    _loss(model, 3).backward()
    with pytest.raises(RAISED, match=r"the averaged gradient of '2\.bias' was infinite or NaN in step 2"):
        optimizer.step()
    optimizer.step()
    _step(model, optimizer, 4)


@pytest.mark.parametrize("strategy", WAYS)
def test_skipped_steps_are_skipped_on_all_ranks(strategy: str) -> None:
    """As if they had not been there, also with what clipping has left, after synchronize() and for a GradScaler."""
    trained = []
    for spoiled in (True, False):
        model = _model()
        optimizer = WRAP[strategy](torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), model, on_nonfinite="skip")
        with heard(logging.WARNING) as said:
            for step in range(6):
                bad = step in (0, 2, 3)
                if bad and not spoiled:
                    continue
                optimizer.zero_grad()
                _loss(model, step, math.nan if bad else 1.0, "0.weight" if step == 2 else "").backward()
                if step == 3:
                    optimizer.clip_grad_norm_(1.0)
                if step == 4:
                    optimizer.synchronize()
                optimizer.step()
        optimizer.synchronize()
        trained.append([parameter.detach().clone() for parameter in model.parameters()])
        told = [text for text in said if "is left out on all ranks" in text]
        assert len(told) == (2 if spoiled and dear.rank() == 0 else 0)  # the first and the second, not the third
    for mine, expected in zip(*trained, strict=True):
        assert torch.equal(mine, expected)
        same_everywhere(mine)


@pytest.mark.parametrize("strategy", PACKAGES)
def test_ignored_ones_reach_all_parameters_as_in_torch(strategy: str) -> None:
    model = _model()
    optimizer = WRAP[strategy](torch.optim.SGD(model.parameters(), 0.05), model, on_nonfinite="ignore")
    for step in range(4):
        _step(model, optimizer, step, math.nan if step == 1 else 1.0)
    assert all(bool(parameter.isnan().all()) for parameter in model.parameters())


@pytest.mark.parametrize("choice", ["raise", "skip"])
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("strategy", PACKAGES)
def test_a_grad_scaler_is_left_alone(strategy: str, unscale: bool, choice: str) -> None:
    """It skips, and lowers its scale."""
    model = _model()
    optimizer = WRAP[strategy](torch.optim.SGD(model.parameters(), 0.05), model, on_nonfinite=choice)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    with heard(logging.WARNING) as said:
        for step in range(5):
            optimizer.zero_grad()
            scaler.scale(_loss(model, step, math.inf if step in (1, 2) else 1.0)).backward()
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    assert scaler.get_scale() == 16.0
    assert not any("infinite" in text for text in said)
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())


@pytest.mark.parametrize("strategy", PACKAGES)
def test_what_a_script_has_put_right_is_no_reason(strategy: str) -> None:
    model = _model()
    optimizer = WRAP[strategy](torch.optim.SGD(model.parameters(), 0.05), model)
    for step in range(4):
        optimizer.zero_grad()
        _loss(model, step, math.nan if step else 1.0).backward()
        optimizer.synchronize()
        for parameter in model.parameters():
            assert parameter.grad is not None
            torch.nan_to_num_(parameter.grad) if step < 3 else setattr(parameter, "grad", parameter.grad.nan_to_num())
        optimizer.step()
    _step(model, optimizer, 4)
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())


@pytest.mark.parametrize("strategy", PACKAGES)
def test_dropped_gradients_are_no_reason(strategy: str) -> None:
    model = _model()
    optimizer = WRAP[strategy](torch.optim.SGD(model.parameters(), 0.05), model)
    for step in range(5):
        optimizer.zero_grad()
        _loss(model, step, math.nan if step % 2 else 1.0).backward()
        if step % 2 == 0:
            optimizer.step()


def test_the_last_step_is_said_when_training_ends() -> None:
    model = _model()
    optimizer = dear.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.05), model)
    _step(model, optimizer, 0, math.nan)
    with heard(logging.ERROR) as said:
        optimizer.finish()
    assert any("was infinite or NaN in step 0" in text for text in said)


def test_large_finite_averages_are_no_reason() -> None:
    """Their sum is infinite, and they are not."""
    model = nn.Linear(64, 64, bias=False)
    optimizer = dear.DistributedOptimizer(torch.optim.SGD(model.parameters(), 1e-38), model)
    for _ in range(3):
        optimizer.zero_grad()
        (model.weight.sum() * 1e38).backward()
        optimizer.step()


def test_where_steps_cannot_be_left_out_that_is_refused() -> None:
    model = _model()
    with pytest.raises(
        ValueError, match="on_nonfinite='skip' leaves out a step when all gradients are known, and eager"
    ):
        dear.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 0.1), model, eager=True, threshold_mb=1, on_nonfinite="skip"
        )
    optimizer = dear.DistributedOptimizer(torch.optim.LBFGS(model.parameters()), model, on_nonfinite="skip")
    with pytest.raises(ValueError, match="LBFGS may evaluate a closure several times in one"):
        optimizer.step(lambda: 0.0)
    with pytest.raises(TypeError, match="on_nonfinite should be 'raise', 'skip' or 'ignore' and is 'warn'"):
        dear.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, on_nonfinite="warn")


@pytest.mark.parametrize("choice", ["raise", "skip"])
def test_blocks_of_co2_look_at_their_own_averages(choice: str) -> None:
    model = _model()
    optimizer = co2.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.05), model, nprocs_per_node=1, outer_frequency=4, on_nonfinite=choice
    )
    spoiled = dear.rank() == dear.size() - 1
    _step(model, optimizer, 0, math.nan)
    fails = pytest.raises(NonfiniteGradient) if spoiled and choice == "raise" else contextlib.nullcontext()
    with fails:
        _step(model, optimizer, 1)
    assert bool(model[0].weight.isfinite().all()) is (choice == "skip" or not spoiled)
    if spoiled and choice == "raise":
        optimizer.step()  # the step that has raised, which the others have made
