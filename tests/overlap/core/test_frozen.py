"""Values are compared with what they were, and put back where they lie."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch

from overlap.core.frozen import freeze, same, thaw


class _Plain:
    def __init__(self) -> None:
        self.count, self.nested = 0, {"deep": [1, 2]}


def _set(value: Any, name: str) -> None:
    value[name] = 1


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "list": (lambda: [1, [2]], lambda value: value[1].append(3)),
    "dictionary": (lambda: {"a": 1}, lambda value: _set(value, "b")),
    "key gone": (lambda: {"a": 1, "b": 2}, lambda value: value.pop("a")),
    "set": (lambda: {1}, lambda value: value.add(2)),
    "deque": (lambda: deque([1, 2], maxlen=2), lambda value: value.append(3)),
    "tensor": (lambda: torch.zeros(3), lambda value: value.add_(1)),
    "tensor in a tuple": (lambda: (torch.zeros(3),), lambda value: value[0].add_(1)),
    "object": (_Plain, lambda value: vars(value).update(count=1)),
    "inside an object": (_Plain, lambda value: value.nested["deep"].append(3)),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_is_seen_and_taken_back_in_place(kind: str) -> None:
    make, change = CHANGES[kind]
    value = make()
    before = freeze(value)
    assert same(before, freeze(value))
    assert same(before, freeze(make()))
    change(value)
    after = freeze(value)
    assert not same(before, after)
    assert thaw(before) is value
    assert same(freeze(value), before)
    assert thaw(after) is value
    assert same(freeze(value), after)


@pytest.mark.parametrize(("one", "other"), [(1, 2), (1, 1.0), (True, 1), ("a", "b"), ([1], (1,)), (None, 0)])
def test_other_values_are_not_the_same(one: Any, other: Any) -> None:
    assert not same(freeze(one), freeze(other))


def test_a_nan_is_the_same_as_a_nan() -> None:
    assert same(freeze(float("nan")), freeze(float("nan")))
    assert same(freeze(torch.tensor(torch.nan)), freeze(torch.tensor(torch.nan)))


def test_what_is_kept_by_parameter_is_left_alone() -> None:
    param = torch.zeros(1)
    value = {param: 1, "other": 2}
    before = freeze(value)
    value[param] = 3
    assert same(before, freeze(value))
    thaw(before)
    assert value[param] == 3


def test_large_tensors_are_compared_by_their_version_and_not_copied() -> None:
    value = torch.zeros(100_000)
    before = freeze(value)
    assert before.inside is None
    assert same(before, freeze(value))
    value.add_(1)
    assert not same(before, freeze(value))


def test_values_that_hold_themselves_come_to_an_end() -> None:
    value: list[Any] = [1]
    value.append(value)
    before = freeze(value)
    value[0] = 2
    assert not same(before, freeze(value))
    assert thaw(before)[0] == 1
