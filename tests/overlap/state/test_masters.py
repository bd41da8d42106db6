"""Exact values of rounded parameters in a state dict: those that are known."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from overlap.state.masters import MASTER, taken, unnumbered


def test_exact_values_that_are_not_known_are_left_out_and_nothing_of_them_stays_in_the_state() -> None:
    known, unknown, half, without = (torch.nn.Parameter(torch.ones(2)) for _ in range(4))
    nan = float("nan")
    full: dict[torch.Tensor, dict[str, Any]] = {
        known: {MASTER: torch.tensor([1.0, 2.0]), "step": 3},
        unknown: {MASTER: torch.tensor([nan, nan])},
        half: {MASTER: torch.tensor([1.0, nan]), "step": 4},
        without: {"step": 5},
    }
    found = taken(full)
    assert list(found) == [known]
    assert found[known].tolist() == [1.0, 2.0]
    assert full == {known: {"step": 3}, half: {"step": 4}, without: {"step": 5}}


def test_they_go_by_the_number_of_their_parameter_over_all_groups() -> None:
    first, second, third = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
    optimizer = torch.optim.SGD([{"params": [first, second]}, {"params": [third]}], 0.1)
    values = torch.tensor([1.0, 2.0])
    assert unnumbered(optimizer, {2: values}) == {third: values}
    with pytest.raises(ValueError, match=r"master of parameter 1 has shape \(3,\)"):
        unnumbered(optimizer, {1: torch.zeros(3)})
