"""What the first iteration teaches: the order of use in training, and that in which gradients are complete."""

from __future__ import annotations

import pytest
import torch

from overlap.core.bucket import Slot
from overlap.core.buckets.observer import Observer


@pytest.fixture
def slots() -> list[Slot]:
    return [Slot(number, str(number), torch.nn.Parameter(torch.ones(2)), 0) for number in range(3)]


def _forward(observer: Observer, slots: list[Slot], order: tuple[int, ...]) -> None:
    """Of layers with a parameter each, in that order."""
    for number in order:
        layer = torch.nn.Identity()
        observer.enter(layer)
        observer.touch(slots[number])
        observer.leave(layer)


def test_an_evaluation_before_training_says_nothing_about_the_order_of_use(slots: list[Slot]) -> None:
    observer = Observer(slots)
    with torch.no_grad():
        _forward(observer, slots, (2, 1, 0))
    _forward(observer, slots, (0, 2, 1))
    assert observer.finish().units == ((0,), (2,), (1,))


def test_a_parameter_that_is_looked_at_outside_a_forward_is_not_used_by_that(slots: list[Slot]) -> None:
    observer = Observer(slots)
    observer.touch(slots[2])
    _forward(observer, slots, (0, 2))
    facts = observer.finish()
    assert facts.units == ((0,), (2,), (1,))
    assert facts.idle == {0, 1, 2}


def test_a_gradient_is_complete_with_its_last_accumulation(slots: list[Slot]) -> None:
    observer = Observer(slots)
    for number in (2, 1, 2, 0):
        observer.gradient(slots[number])
    assert observer.finish().arrivals == (1, 2, 0)


@pytest.mark.parametrize(("again", "reread"), [(False, {0}), (True, set())])
def test_what_backward_reads_after_the_last_gradient_is_noted(slots: list[Slot], again: bool, reread: set[int]) -> None:
    """And not what it reads between two gradients of it."""
    observer = Observer(slots)
    observer.gradient(slots[0])
    x = torch.ones(1, requires_grad=True)
    hidden = x * 2
    hidden.register_hook(lambda _: observer.touch(slots[0]))
    hidden.sum().backward()
    if again:
        observer.gradient(slots[0])
    assert observer.finish().reread == reread
