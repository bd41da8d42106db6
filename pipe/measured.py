"""Where the time of a stage's steps goes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import NamedTuple

from pipe.schedule import bubble

__all__ = ["Measured"]


class _Step(NamedTuple):
    micro_batches: int
    seconds: float
    computing: float


class Measured:
    """The last steps of a pipeline along so many `ranks`, as one of them has seen them, which has `each` so many stages."""

    def __init__(self, ranks: int, each: int = 1) -> None:
        self._ranks, self._each = ranks, each
        self._computing = 0.0
        self._steps: deque[_Step] = deque(maxlen=20)

    @property
    def micro_batches(self) -> int:
        """Of the last step."""
        return self._steps[-1].micro_batches

    @contextmanager
    def computing(self) -> Iterator[None]:
        """A context in which the stage works on a micro-batch."""
        since = time.perf_counter()
        try:
            yield
        finally:
            self._computing += time.perf_counter() - since

    def step(self, micro_batches: int, seconds: float) -> None:
        """A step of so many micro-batches is over."""
        self._steps.append(_Step(micro_batches, seconds, self._computing))
        self._computing = 0.0

    def told(self, stages: Sequence[int], balance: Sequence[int]) -> str:
        """The medians, as a table."""
        if len(self._steps) < 3:
            raise RuntimeError("there is nothing to explain yet: make some steps")
        steps = [each for each in self._steps if each.micro_batches == self._steps[-1].micro_batches]
        count = steps[-1].micro_batches
        whole, computing = median(each.seconds for each in steps), median(each.computing for each in steps)
        waits = computing * (self._ranks - 1) / (self._each * count)
        rest = whole - computing - waits

        def row(name: str, seconds: float, more: str = "") -> str:
            return f"  {name:<22} {1e3 * seconds:>9.2f} ms {100 * seconds / whole:>6.1f} %{more}"

        return "\n".join(
            [
                f"stage {', '.join(map(str, stages))} of {len(balance)}, layers {'+'.join(map(str, balance))}, {count} "
                f"micro-batches, medians of {len(steps)} steps",
                row("step", whole),
                row("computation", computing),
                row(
                    "bubble",
                    waits,
                    f"   {100 * bubble(count, self._ranks, self._each):.1f} % of a step of nothing else",
                ),
                row("calls, messages, waits", rest, f"   {1e3 * rest / count:.2f} ms for each micro-batch"),
            ]
        )
