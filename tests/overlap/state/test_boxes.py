"""Ranges of flattened tensors as boxes: together they have the elements of the range, each once, in their order."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from overlap.state.boxes import Region, boxes, dims_in_memory, segments

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


def _random_parts(generator: random.Random, length: int) -> tuple[tuple[int, ...], int]:
    """Lengths of parts of a dimension, and in how many blocks each was divided for itself."""
    stride = generator.choice([each for each in (1, 2, 3) if length % each == 0])
    cuts = sorted(generator.choices(range(length // stride + 1), k=generator.randint(0, 3)))
    ends = [0, *cuts, length // stride]
    return tuple(stride * (stop - start) for start, stop in itertools.pairwise(ends)), stride


def _taken(whole: torch.Tensor, dim: int, lengths: tuple[int, ...], part: int, stride: int) -> torch.Tensor:
    each = [length // stride for length in lengths]
    return torch.cat([block.split(each, dim)[part] for block in whole.chunk(stride, dim)], dim)


def test_ranges_of_parts_lie_in_the_whole_tensor() -> None:
    """Parts along all dimensions, of uneven lengths and in blocks: all ranges of all parts fill the whole, once."""
    generator = random.Random(5)
    for _ in range(200):
        shape = [generator.randint(1, 7) for _ in range(generator.randint(0, 3))]
        numbers = torch.arange(max(1, torch.Size(shape).numel())).view(shape)
        divided = [_random_parts(generator, length) for length in shape]
        found = torch.full_like(numbers, -1)
        for chosen in itertools.product(*(range(len(lengths)) for lengths, _ in divided)):
            part = numbers
            for dim, (number, (lengths, stride)) in enumerate(zip(chosen, divided, strict=True)):
                part = _taken(part, dim, lengths, number, stride)
            region = Region(
                tuple(shape),
                tuple(
                    segments(lengths, number, stride) for number, (lengths, stride) in zip(chosen, divided, strict=True)
                ),
            )
            assert region.local == part.shape
            assert region.divided == (part.shape != numbers.shape)
            flat, middle = part.flatten(), generator.randint(0, part.numel())
            for box in [*boxes(part.shape, 0, middle), *boxes(part.shape, middle, part.numel())]:
                values = flat[box.start : box.stop].view(box.sizes)
                for place in region.places(box):
                    inside = [slice(at, at + size) for at, size in zip(place.inside, place.sizes, strict=True)]
                    there = tuple(slice(at, at + size) for at, size in zip(place.offsets, place.sizes, strict=True))
                    assert bool((found[there] == -1).all())
                    found[there] = values[tuple(inside)]
        assert torch.equal(found, numbers)
