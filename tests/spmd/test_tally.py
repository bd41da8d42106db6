"""What any rank says is what all of them read, in the order of their calls; and what scripts make of it."""

from __future__ import annotations

import pytest
import torch

import dear
from overlap.core.tally import Said, Tally
from overlap.job.session import current
from tests.spmd.test_contract import _loss, _same_everywhere
from tests.spmd.test_parity import PACKAGES, WRAP, _model


@pytest.fixture(autouse=True)
def _session() -> None:
    dear.init()


def test_all_read_what_any_rank_said() -> None:
    tally = Tally(current().channels.named("test of a tally"))
    last = dear.rank() == dear.size() - 1
    for mine, all_of_them in [
        (Said(), Said()),
        (Said(gradients=last), Said(gradients=True)),
        (Said(late=not last), Said(late=dear.size() > 1)),
        (Said(gradients=last, late=not last), Said(gradients=True, late=dear.size() > 1)),
    ]:
        tally.post(mine, "test")
        assert tally.read() == all_of_them


@pytest.mark.parametrize("strategy", PACKAGES)
def test_synchronize_waits_for_nobody_s_gradients_after_a_step(strategy: str) -> None:
    """On every rank, as often as one likes; nothing is averaged twice."""
    model = _model("Mlp")
    optimizer = WRAP[strategy](torch.optim.SGD(model.parameters(), 0.05), model)
    for step in range(3):
        optimizer.zero_grad()
        _loss(model, step).backward()
        optimizer.step()
        before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        for _ in range(2):
            optimizer.synchronize()
        for parameter, gradient in zip(model.parameters(), before, strict=True):
            assert gradient is None or torch.equal(parameter.grad, gradient)  # type: ignore[arg-type]
    for parameter in model.parameters():
        _same_everywhere(parameter.detach())


def test_gradients_of_replaced_buckets_are_not_averaged_again() -> None:
    model = _model("Mlp")
    optimizer = WRAP["dear"](torch.optim.SGD(model.parameters(), 0.05), model)
    for step in range(3):
        optimizer.zero_grad()
        _loss(model, step).backward()
        optimizer.step()
        optimizer.replan(optimizer.strategy.at({"threshold_mb": 1.0 + step}))
        rounds = optimizer._engine.attendance.round
        optimizer.synchronize()
        assert optimizer._engine.attendance.round == rounds
        assert not optimizer._engine.local


@pytest.mark.parametrize("strategy", PACKAGES)
def test_what_some_rank_trains_later_is_trained_on_all(strategy: str) -> None:
    """Layers that one rank alone has thawed, one after the other: each takes part from then on, everywhere."""
    model = _model("Mlp")
    layers = [layer for layer in model.inner if list(layer.parameters())]
    for layer in layers:
        layer.requires_grad_(False)
    optimizer = WRAP[strategy](torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), model)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for step in range(2 * len(layers)):
        if step % 2 and (step // 2) % dear.size() == dear.rank():
            layers[step // 2].requires_grad_(True)
        optimizer.zero_grad()
        _loss(model, step).backward()
        optimizer.step()
    optimizer.synchronize()
    for parameter, value in zip(model.parameters(), before, strict=True):
        assert not torch.equal(parameter, value)
        _same_everywhere(parameter.detach())
