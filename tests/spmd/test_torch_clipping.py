"""torch's own clipping between backward and step(), in scripts that know nothing of it: averages are clipped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import dear
from overlap.features.early import UpdatedEarly
from tests.spmd.one_process import as_in_one_process, loss_of, small_model, train
from tests.spmd.strategies import PACKAGES, WRAP

_Parameters = Callable[[nn.Module, Any], Any]


#: Where scripts have the parameters from that they clip.
SOURCES: dict[str, _Parameters] = {
    "model.parameters()": lambda model, _: model.parameters(),
    "list": lambda model, _: [*model.parameters()],
    "groups": lambda _, optimizer: (p for group in optimizer.param_groups for p in group["params"]),
    "some": lambda model, _: model[0].parameters(),
    "one": lambda model, _: model[0].weight,
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("way", ["dear-layerwise", "dear-rb", *PACKAGES[1:]])
def test_clip_grad_norm(way: str, source: str) -> None:
    norms: list[torch.Tensor] = []

    def script(model: nn.Module, optimizer: Any, alone: bool) -> None:
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, step, alone).backward()
            norms.append(
                clip_grad_norm_(SOURCES[source](model, optimizer), 0.02, norm_type=2 if step else float("inf"))
            )
            optimizer.step()

    as_in_one_process(way, script)
    torch.testing.assert_close(norms[:4], norms[4:], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("way", ["dear-layerwise", *PACKAGES[1:]])
def test_clip_grad_value(way: str) -> None:
    def script(model: nn.Module, optimizer: Any, alone: bool) -> None:
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, step, alone).backward()
            clip_grad_value_(model.parameters(), 0.01)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.02)  # of what the first one left
            optimizer.step()

    as_in_one_process(way, script)


@pytest.mark.parametrize("way", ["dear-layerwise", "wfbp"])
def test_a_norm_over_two_optimizers_and_what_belongs_to_none(way: str) -> None:
    def script(model: nn.Module, optimizer: Any, alone: bool) -> None:
        first, second = optimizer
        extra = nn.Parameter(torch.ones(3, dtype=torch.float64))
        for step in range(3):
            for one in optimizer:
                one.zero_grad()
            extra.grad = torch.full_like(extra, 0.5)
            loss_of(model, step, alone).backward()
            clip_grad_norm_([*model.parameters(), extra], 0.02)
            first.step()
            second.step()

    def both(model: nn.Module, wrap: Any) -> list[Any]:
        return [wrap(torch.optim.SGD(model[number].parameters(), 0.1, momentum=0.9), model) for number in (0, 2)]

    model, reference = small_model(), small_model()
    script(reference, both(reference, lambda optimizer, _: optimizer), True)
    optimizers = both(model, WRAP[way])
    script(model, optimizers, False)
    for one in optimizers:
        one.synchronize()
    torch.testing.assert_close([*model.parameters()], [*reference.parameters()], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("way", ["dear-layerwise", "wfbp"])
def test_a_norm_over_one_optimizer_and_what_belongs_to_none(way: str) -> None:
    """Which is clipped by the norm of all of it, too."""
    extras: list[torch.Tensor] = []

    def script(model: nn.Module, optimizer: Any, alone: bool) -> None:
        extra = nn.Parameter(torch.ones(3, dtype=torch.float64))
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, step, alone).backward()
            extra.grad = torch.full_like(extra, 0.5)
            clip_grad_norm_([*model.parameters(), extra], 0.02)
            optimizer.step()
        assert extra.grad is not None
        extras.append(extra.grad)

    as_in_one_process(way, script)
    torch.testing.assert_close(extras[1], extras[0])


@pytest.mark.parametrize("way", ["dear-layerwise", "wfbp", "bytescheduler"])
def test_after_a_step_it_is_torchs_own(way: str) -> None:
    """Gradients that a step has used are nobody's round any more: all ranks find that, and training goes on."""
    model = small_model()
    optimizer = WRAP[way](torch.optim.SGD(model.parameters(), 0.1), model)
    train(model, optimizer, False)
    clip_grad_norm_(model.parameters(), 1e9)
    train(model, optimizer, False, first=2)
    optimizer.synchronize()


def test_a_rank_without_a_batch_takes_part() -> None:
    model = small_model()
    optimizer = WRAP["dear-layerwise"](torch.optim.SGD(model.parameters(), 0.1), model)
    norms = []
    for step in range(3):
        optimizer.zero_grad()
        if dear.size() == 1 or dear.rank() != dear.size() - 1 or step != 1:
            loss_of(model, step, False).backward()
        norms.append(clip_grad_norm_(model.parameters(), 0.02).item())
        optimizer.step()
    assert norms == dear.allgather_object(norms)[0]
    assert min(norms) > 0


def test_early_updates_refuse_it() -> None:
    model = small_model()
    optimizer = dear.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), model, eager=True, threshold_mb=0.0001
    )
    train(model, optimizer, False)
    loss_of(model, 2, False).backward()
    with pytest.raises(UpdatedEarly, match="eager=False"):
        clip_grad_norm_(model.parameters(), 0.02)


def test_parameters_of_no_distributed_optimizer_are_clipped_as_ever() -> None:
    parameter = nn.Parameter(torch.ones(4))
    parameter.grad = torch.full((4,), 2.0)
    assert clip_grad_norm_(parameter, 1.0).item() == pytest.approx(4.0)
    assert parameter.grad.norm().item() == pytest.approx(1.0)
    clip_grad_value_([parameter], 0.25)
    assert parameter.grad.abs().max().item() == pytest.approx(0.25)


def test_arguments_may_come_by_position() -> None:
    """Those behind the ones that matter here, too."""
    model = small_model()
    optimizer = WRAP["dear-layerwise"](torch.optim.SGD(model.parameters(), 0.1), model)
    parameter = nn.Parameter(torch.full((4,), 2.0))
    for parameters in ([parameter], [*model.parameters()], [*model.parameters(), parameter]):
        parameter.grad = torch.full((4,), 2.0)
        loss_of(model, 0, False).backward()
        assert clip_grad_norm_(parameters, 0.02, 2.0, False, False) > 0.02
        clip_grad_value_(parameters, 0.001, False)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()


@pytest.mark.parametrize("clip", [clip_grad_norm_, dear.clip_grad_norm_])
@pytest.mark.parametrize("before", [lambda model: model, lambda model: model[0]])
def test_an_optimizer_that_has_lost_its_parameters_is_not_asked(clip: Any, before: Callable[[Any], nn.Module]) -> None:
    kept: list[Any] = []

    def script(model: nn.Module, optimizer: Any, alone: bool) -> None:
        if not alone:  # wrapped before, by one that the script still has
            kept.append(optimizer)
            optimizer = WRAP["dear-layerwise"](torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), model)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, step, alone).backward()
            (clip_grad_norm_ if alone else clip)(model.parameters(), 0.02)
            optimizer.step()
        if not alone:
            optimizer.synchronize()

    model, reference = small_model(), small_model()
    script(reference, torch.optim.SGD(reference.parameters(), 0.1, momentum=0.9), True)
    first = before(model)
    script(model, WRAP["dear-layerwise"](torch.optim.SGD(first.parameters(), 0.1), first), False)
    assert kept
    torch.testing.assert_close([*model.parameters()], [*reference.parameters()], rtol=1e-9, atol=1e-12)
