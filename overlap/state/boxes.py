"""Cuts a range of a flattened tensor into rectangular boxes, and finds them in a larger tensor that it is a part of.

Pure: numbers in, numbers out; no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import NamedTuple

__all__ = ["Box", "Place", "Region", "Segment", "boxes", "dims_in_memory", "segments"]


class Box(NamedTuple):
    """A rectangular part of a tensor whose elements lie next to each other: [start, stop) of the flattened tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    stop: int


class Segment(NamedTuple):
    """Consecutive indices of a dimension: from `here` on in a part, from `there` on in the whole, so many."""

    here: int
    there: int
    length: int


class Place(NamedTuple):
    """What a box is of a larger tensor: a box there, and where it lies `inside` the first one."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    inside: tuple[int, ...]


class Region(NamedTuple):
    """Where a part lies in a whole tensor: the `shape` of that, and for each dimension the segments that the part has."""

    shape: tuple[int, ...]
    dims: tuple[tuple[Segment, ...], ...]

    @property
    def local(self) -> tuple[int, ...]:
        """The shape of the part."""
        return tuple(sum(segment.length for segment in dim) for dim in self.dims)

    @property
    def divided(self) -> bool:
        """Whether there are other parts."""
        return self.shape != self.local

    def places(self, box: Box) -> list[Place]:
        """Where a box of the part lies in the whole tensor: in one place, unless it has several segments."""
        cuts = [_meet(*dim) for dim in zip(self.dims, box.offsets, box.sizes, strict=True)]
        return [Place(*zip(*chosen, strict=True)) if chosen else Place((), (), ()) for chosen in product(*cuts)]


def _meet(dim: tuple[Segment, ...], offset: int, size: int) -> list[tuple[int, int, int]]:
    """What a range of the part has of each segment: its start in the whole, its length, its start in the range."""
    found = []
    for here, there, length in dim:
        low, high = max(here, offset), min(here + length, offset + size)
        if low < high:
            found.append((there + low - here, high - low, low - offset))
    return found


def segments(lengths: Sequence[int], part: int, stride: int = 1) -> tuple[Segment, ...]:
    """Those of the part of this number, where a dimension is divided into parts of these `lengths`.

    With a `stride`, each of so many equal blocks of it was divided for itself.
    """
    mine, block, before = lengths[part] // stride, sum(lengths) // stride, sum(lengths[:part]) // stride
    return tuple(Segment(number * mine, number * block + before, mine) for number in range(stride))


def boxes(shape: Sequence[int], start: int, stop: int, dims: Sequence[int] | None = None) -> list[Box]:
    """The elements [start, stop) of a flattened tensor of `shape`, as boxes in the order in which they lie.

    `dims`: the tensor's dimensions from the outermost to the innermost as its elements lie in memory; None: as they are
    numbered. At most 2n-1 boxes of a tensor of n dimensions (one if n is 0), none of which is empty.
    """
    order = tuple(range(len(shape))) if dims is None else tuple(dims)
    found = []
    begin = start
    for offsets, sizes in _cut(tuple(shape[dim] for dim in order), start, stop) if start < stop else ():
        end = begin + prod(sizes)
        found.append(Box(_numbered(order, offsets), _numbered(order, sizes), begin, end))
        begin = end
    return found


def dims_in_memory(strides: Sequence[int]) -> tuple[int, ...]:
    """The dimensions of a dense tensor with these `strides`, from the outermost to the innermost."""
    return tuple(sorted(range(len(strides)), key=lambda dim: -strides[dim]))


def _numbered(order: Sequence[int], values: Sequence[int]) -> tuple[int, ...]:
    by_dim = dict(zip(order, values, strict=True))
    return tuple(by_dim[dim] for dim in range(len(order)))


_Extent = tuple[tuple[int, ...], tuple[int, ...]]  # offsets, sizes


def _cut(shape: tuple[int, ...], start: int, stop: int) -> list[_Extent]:
    """Of a range that is not empty: what is left of its first row, the whole rows, and what it has of its last row."""
    if not shape:
        return [((), ())]
    row = prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    if first == last and stop - start < row:
        return _inside(first, _cut(shape[1:], start - first * row, stop - first * row))
    found: list[_Extent] = []
    if start % row:
        found += _inside(first, _cut(shape[1:], start % row, row))
        first += 1
    whole = stop // row
    if first < whole:
        found.append(((first, *(0 for _ in shape[1:])), (whole - first, *shape[1:])))
    if stop % row:
        found += _inside(whole, _cut(shape[1:], 0, stop % row))
    return found


def _inside(index: int, extents: list[_Extent]) -> list[_Extent]:
    return [((index, *offsets), (1, *sizes)) for offsets, sizes in extents]
