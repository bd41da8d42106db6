"""Judges how far predictions are from measurements, and whether they order methods right. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

from bench.sweep.summary import GROUP
from bench.train.settings import Settings

__all__ = ["CLOSE", "GOALS", "Cell", "Order", "Summary", "order", "summary"]

CLOSE = 0.05  # errors within it are counted, and methods that differ by less have no order
GOALS = 0.03, 0.9  # of the median error at most, and of the share of cells within 5 % at least
_BUSY = 0.9  # of all cores: from here on they, and not the links, may be what was measured
_ALIKE = tuple(name for name in GROUP if name != "warmup")


@dataclass(frozen=True)
class Cell:
    """A cell: predicted and measured (median) seconds of a step.

    `cores_busy`: the share of the machine's cores that was busy. `disturbed`: whether others used them.
    """

    settings: Settings
    predicted: float
    measured: float
    cores_busy: float | None
    disturbed: bool = False

    @property
    def error(self) -> float:
        """The relative error of the prediction, above 0 where it is too slow."""
        return self.predicted / self.measured - 1

    @property
    def real(self) -> bool:
        return self.settings.emulate_compute is None

    @property
    def limited_by_cores(self) -> bool:
        return self.cores_busy is not None and self.cores_busy >= _BUSY


@dataclass(frozen=True)
class Summary:
    """The errors of `count` cells: the `median` of their sizes, and how many are `within` 5 %.

    With their sign are the `worst` and the `mean`; so many cells were predicted too `fast`, and too `slow`.
    """

    count: int
    median: float
    within: int
    worst: float
    mean: float
    fast: int
    slow: int

    @property
    def met(self) -> tuple[bool, bool]:
        """Which of the :data:`GOALS` are met: for the median, for the share."""
        return self.median <= GOALS[0], self.within >= GOALS[1] * self.count


def summary(cells: Sequence[Cell]) -> Summary | None:
    """The summary of all cells; None where there are none."""
    if not cells:
        return None
    errors = [cell.error for cell in cells]
    within = sum(abs(error) <= CLOSE for error in errors)
    fast, slow = sum(error < 0 for error in errors), sum(error > 0 for error in errors)
    median, worst, mean = statistics.median(map(abs, errors)), max(errors, key=abs), statistics.fmean(errors)
    return Summary(len(cells), median, within, worst, mean, fast, slow)


@dataclass(frozen=True)
class Order:
    """Pairs of methods in one group whose steps differ by more than 5 %, and those that were predicted otherwise."""

    pairs: int
    wrong: tuple[tuple[Cell, Cell], ...]


def order(cells: Iterable[Cell]) -> Order:
    """Compare the methods within groups of cells that differ only in the method.

    Of a wrong pair, the faster one comes first.
    """
    groups: dict[tuple[object, ...], list[Cell]] = {}
    for cell in cells:
        groups.setdefault(tuple(getattr(cell.settings, name) for name in _ALIKE), []).append(cell)
    pairs, wrong = 0, []
    for group in groups.values():
        for fast, slow in combinations(sorted(group, key=lambda cell: cell.measured), 2):
            if slow.measured <= (1 + CLOSE) * fast.measured:
                continue
            pairs += 1
            if slow.predicted <= fast.predicted:
                wrong.append((fast, slow))
    return Order(pairs, tuple(wrong))
