"""Judges whether predictions order methods as papers do, and how far speedups are from published ones. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import combinations

from bench.validation.judge import CLOSE
from bench.validation.papers.published import Cell

__all__ = ["ALIKE", "Compared", "Pair", "Verdict", "by_methods", "median_error", "pairs", "speedups"]


ALIKE = 0.01  # what is predicted to differ by less has no order


class Verdict(Enum):
    """How the predicted order of two methods compares with the published one."""

    IN_ORDER = "in order"
    ALIKE = "alike"
    OPPOSITE = "opposite"


@dataclass(frozen=True)
class Compared:
    """A cell with each method's seconds of a step: as predicted, and the least and the most of the guesses.

    `base`: the method that speedups are over. `alone`: seconds of a step on one GPU, as predicted. `nbytes`: of all
    gradients.
    """

    cell: Cell
    predicted: Mapping[str, tuple[float, float, float]]
    base: str
    alone: float
    nbytes: int

    @property
    def steps(self) -> dict[str, float]:
        return {method: step for method, (step, _, _) in self.predicted.items()}

    @property
    def within(self) -> int:
        """The number of methods whose published step is in the predicted range."""
        return sum(least <= self.cell.steps[name] <= most for name, (_, least, most) in self.predicted.items())


@dataclass(frozen=True)
class Pair:
    """Two methods of a cell that differ by more than 5 %. `fast` is the faster one as published."""

    cell: Cell
    fast: str
    slow: str
    published: float
    predicted: float

    @property
    def verdict(self) -> Verdict:
        if self.predicted > 1 + ALIKE:
            return Verdict.IN_ORDER
        return Verdict.ALIKE if self.predicted >= 1 / (1 + ALIKE) else Verdict.OPPOSITE


def pairs(cell: Cell, predicted: Mapping[str, float]) -> list[Pair]:
    """All pairs of methods that have an order.

    `published` and `predicted` are how many times longer the slower one takes.
    """
    found = []
    for fast, slow in combinations(sorted(cell.steps, key=lambda name: cell.steps[name]), 2):
        ratio = cell.steps[slow] / cell.steps[fast]
        if ratio > 1 + CLOSE:
            found.append(Pair(cell, fast, slow, ratio, predicted[slow] / predicted[fast]))
    return found


def by_methods(found: Iterable[Pair]) -> dict[tuple[str, str], list[Pair]]:
    """Pairs of the same two methods, whichever is faster."""
    groups: dict[tuple[str, str], list[Pair]] = {}
    for pair in found:
        first, second = sorted((pair.fast, pair.slow))
        groups.setdefault((first, second), []).append(pair)
    return groups


def speedups(steps: Mapping[str, float], base: str) -> dict[str, float]:
    """How many times faster than `base` each method is, the fastest first."""
    return {name: steps[base] / steps[name] for name in sorted(steps, key=lambda name: steps[name])}


def median_error(compared: Sequence[Compared]) -> float:
    """The median factor by which predicted speedups over the base are off, in either direction, less 1."""
    errors = []
    for one in compared:
        published, predicted = speedups(one.cell.steps, one.base), speedups(one.steps, one.base)
        errors += [abs(math.log(predicted[name] / published[name])) for name in published if name != one.base]
    return math.exp(statistics.median(errors)) - 1
