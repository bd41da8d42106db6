"""Ranges of flattened tensors as boxes: together they have the elements of the range, each once, in their order."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from overlap.state.boxes import boxes, dims_in_memory

SHAPES = [
    (),
    (1,),
    (7,),
    (1, 1),
    (3, 4),
    (4, 1),
    (1, 5),
    (2, 3, 4),
    (3, 1, 2),
    (1, 1, 6),
    (2, 1, 3, 2),
    (2, 2, 2, 2),
    (1, 2, 2, 1, 3),
]


def _check(shape: tuple[int, ...], start: int, stop: int, like: torch.Tensor) -> None:
    """`like` has the numbers of its elements, in the order in which they lie."""
    found = boxes(shape, start, stop, dims_in_memory(like.stride()))
    assert len(found) <= max(1, 2 * len(shape) - 1)
    expected = start
    for box in found:
        part = like[tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))]
        assert part.shape == box.sizes
        assert box.start == expected
        expected = box.stop
        order = dims_in_memory(like.stride())
        assert part.permute(order).flatten().tolist() == list(range(box.start, box.stop)), "in order, no gaps"
    assert expected == stop


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_range_of_small_shapes(shape: tuple[int, ...]) -> None:
    numbers = torch.arange(max(1, torch.Size(shape).numel())).view(shape)
    for start, stop in itertools.combinations(range(numbers.numel() + 1), 2):
        _check(shape, start, stop, numbers)


def test_ranges_of_random_shapes_in_any_layout() -> None:
    generator = random.Random(3)
    for _ in range(2000):
        lying = [generator.randint(1, 6) for _ in range(generator.randint(1, 5))]
        numbers = torch.arange(torch.Size(lying).numel()).view(lying)
        like = numbers.permute(generator.sample(range(len(lying)), len(lying)))
        start, stop = sorted(generator.choices(range(numbers.numel() + 1), k=2))
        if start < stop:
            _check(tuple(like.shape), start, stop, like)


def test_the_bound_is_reached() -> None:
    assert len(boxes((4, 4, 4, 4), 1 + 4 + 16 + 64, 3 * 64 - 1 - 4 - 16 + 64)) == 7


@pytest.mark.parametrize("shape", [(), (3,), (2, 0, 4)])
def test_an_empty_range_has_none(shape: tuple[int, ...]) -> None:
    assert boxes(shape, 0, 0) == []


def test_whole_rows_are_one_box() -> None:
    assert [(box.offsets, box.sizes) for box in boxes((5, 3, 2), 6, 24)] == [((1, 0, 0), (3, 3, 2))]
