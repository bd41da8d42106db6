"""Cuts a range of a flattened tensor into rectangular boxes of the tensor (pure: numbers in, numbers out; no torch)."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

__all__ = ["Box", "boxes", "dims_in_memory"]


class Box(NamedTuple):
    """A rectangular part of a tensor whose elements lie next to each other: [start, stop) of the flattened tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    stop: int


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
