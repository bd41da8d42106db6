"""What it costs to come to a gate: seen by a probe, since no stamp inside a gate can."""

from __future__ import annotations

import torch

from overlap.core.gates.gates import GatedParameters
from overlap.core.gates.passing import passing_cost


def test_passing_costs_something_and_not_much() -> None:
    with torch.no_grad():  # as in step()
        cost = passing_cost()
    assert 0 < cost.module < 1e-3
    assert 0 < cost.parameter < 1e-3
    assert 0 <= cost.gradient < 1e-3


def test_the_model_and_its_class_are_left_alone() -> None:
    model = torch.nn.Linear(2, 2)
    passing_cost()
    assert not isinstance(model._parameters, GatedParameters)
