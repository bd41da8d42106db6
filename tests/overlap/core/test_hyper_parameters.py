"""Hyper-parameters of one rank's step, as joined ranks are told of them and make them theirs."""

from __future__ import annotations

import torch

from overlap.core.step import hyper_parameters, take_hyper_parameters


def _optimizer(rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], torch.tensor(rate), momentum=0.9)


def test_they_are_those_of_the_step_whatever_becomes_of_a_tensor_afterwards() -> None:
    optimizer = _optimizer(0.5)
    told = hyper_parameters(optimizer)
    optimizer.param_groups[0]["lr"].mul_(0.1)
    assert float(told[0]["lr"]) == 0.5
    assert "params" not in told[0]


def test_what_cannot_be_sent_stays_with_its_rank() -> None:
    here, there = _optimizer(0.5), _optimizer(0.25)
    here.param_groups[0]["rule"], there.param_groups[0]["rule"] = lambda: "here", lambda: "there"
    take_hyper_parameters(there, hyper_parameters(here))
    assert there.param_groups[0]["rule"]() == "there"


def test_a_tensor_stays_the_one_that_a_scheduler_holds() -> None:
    here, there = _optimizer(0.5), _optimizer(0.25)
    here.param_groups[0]["momentum"] = 0.8
    held = there.param_groups[0]["lr"]
    take_hyper_parameters(there, hyper_parameters(here))
    assert there.param_groups[0]["lr"] is held
    assert (float(held), there.param_groups[0]["momentum"]) == (0.5, 0.8)
