"""Measures how long a step takes: the median over some steps, after a few that are not counted (pure)."""

from __future__ import annotations

import statistics

__all__ = ["StepWindow"]


class StepWindow:
    """Counts steps and the seconds between their ends; the same number of them on every rank makes it full.

    The first `warmup` steps after a change pay for new buffers and cold caches and do not count. A pause between two
    steps (an evaluation, a checkpoint) is one value of `length` and does not move their median.
    """

    def __init__(self, warmup: int, length: int, now: float) -> None:
        self._warmup, self._length = warmup, length
        self._ticks, self._last = 0, now
        self._seconds: list[float] = []

    def tick(self, now: float) -> float | None:
        """A step ended at `now` (seconds, on the same clock); the median once the window is full, else None."""
        self._ticks += 1
        if self._ticks > self._warmup:
            self._seconds.append(now - self._last)
        self._last = now
        return statistics.median(self._seconds) if len(self._seconds) >= self._length else None
