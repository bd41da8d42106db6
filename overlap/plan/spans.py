"""Intervals of time that may overlap, and how much of another interval they cover. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate

__all__ = ["Spans"]


class Spans:
    """A union of intervals: what several of `spans` cover counts once.

    A look costs a binary search: a step has thousands of them.
    """

    def __init__(self, spans: Iterable[tuple[float, float]]) -> None:
        merged: list[tuple[float, float]] = []
        for since, until in sorted(spans):
            if merged and since <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(merged[-1][1], until)
            else:
                merged.append((since, until))
        self._merged = merged
        self._starts = [since for since, _ in merged]
        self._before = [0.0, *accumulate(until - since for since, until in merged)]

    def _until(self, when: float) -> float:
        """Seconds covered before `when`."""
        place = bisect_right(self._starts, when)
        if not place:
            return 0.0
        since, until = self._merged[place - 1]
        return self._before[place - 1] + min(when, until) - since

    def covered(self, start: float, end: float) -> float:
        """The seconds from `start` to `end` that are covered."""
        return max(0.0, self._until(end) - self._until(start)) if end > start else 0.0
