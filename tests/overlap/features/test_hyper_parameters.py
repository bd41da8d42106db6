"""Which hyper-parameters count as the same, and what is said where they are not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from overlap.features.hyper_parameters import HyperParameters, difference, shown

SAME: list[tuple[Any, Any]] = [
    (0.1, numpy.float64(0.1)),
    (1, 1.0),
    (0.0, -0.0),
    (math.nan, float("nan")),
    ((0.9, 0.999), [0.9, 0.999]),
    ({"a": 1, "b": (2,)}, {"b": (2,), "a": 1}),
    (torch.tensor(0.5), 0.5),
    (print, len),  # these are not compared
    (torch.zeros(1000), torch.ones(1000)),
]
DIFFERENT: list[tuple[Any, Any]] = [
    (0.1, math.nextafter(0.1, 1)),
    (2**53 + 1, 2**53 + 2),
    (True, False),
    (None, 0),
    ("max", "min"),
    ((0.9, 0.999), (0.9, 0.99)),
    ({"a": 1}, {"a": 2}),
    (torch.tensor([0.5, 1.0]), torch.tensor([0.5, 2.0])),
    (math.inf, -math.inf),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_values_that_are_the_same(one: Any, other: Any) -> None:
    assert shown(one) == shown(other)


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_values_that_are_not(one: Any, other: Any) -> None:
    assert shown(one) != shown(other)


def _optimizer() -> torch.optim.Optimizer:
    first, second = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    groups = [{"params": [first]}, {"params": [second], "lr": 0.2}]
    return torch.optim.AdamW(groups, torch.tensor(0.1), betas=(0.9, 0.99), foreach=False)


CHANGES: list[Callable[[list[dict[str, Any]]], Any]] = [
    lambda groups: groups[0]["lr"].mul_(2),
    lambda groups: groups[1].update(lr=0.3),
    lambda groups: groups[1].update(betas=(0.9, 0.98)),
    lambda groups: groups[0].update(maximize=True),
    lambda groups: groups.pop(),
]


@pytest.mark.parametrize("change", CHANGES)
def test_the_digest_follows_every_change(change: Callable[[list[dict[str, Any]]], Any]) -> None:
    """Also of a value that changes where it is, as a tensor does; it is as the same values give it on another rank."""
    optimizer, other = _optimizer(), _optimizer()
    mine, theirs = HyperParameters(optimizer), HyperParameters(other)
    before = mine.digest()
    assert mine.digest() == before == theirs.digest()
    change(optimizer.param_groups)
    assert mine.digest() != before
    change(other.param_groups)
    assert mine.digest() == theirs.digest()
    assert not difference({0: mine.told(), 1: theirs.told()})


def test_how_an_update_is_computed_and_what_a_script_adds_is_not_compared() -> None:
    optimizer = _optimizer()
    mine = HyperParameters(optimizer)
    before = mine.digest()
    optimizer.param_groups[0].update(foreach=True, started_at=17.0)
    assert mine.digest() == before


def test_a_difference_names_the_group_the_value_and_the_ranks() -> None:
    told = [{"betas": "(0.9, 0.9)", "lr": "0.1"}, {"betas": "(0.9, 0.9)", "lr": "0.2"}]
    other = [told[0], {**told[1], "lr": "1.0"}]
    assert difference({0: told, 1: told}) == ""
    assert difference({0: told, 2: other, 3: told}).startswith(
        "'lr' of parameter group 1 is 0.2 on ranks [0, 3] and 1.0 on rank 2: "
    )
    assert difference({0: told, 1: told[:1]}).startswith(
        "the number of parameter groups is 2 on rank 0 and 1 on rank 1"
    )
