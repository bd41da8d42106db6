"""How many times longer one method takes than another: the median of paired ratios, and an interval (pure).

Run i of the one was made beside run i of the other, in turn, so what the machine did then counts on both sides. Each pair
of runs gives a ratio, and their median is what pages say. n is the number of pairs.

The interval is from the k-th smallest to the k-th largest of n ratios. The median of all ratios that could be measured
lies outside of it where fewer than k of the n are below it, or fewer than k above it. Each is below with probability 1/2,
so that happens with probability 2 (C(n, 0) + … + C(n, k - 1)) / 2^n, and k is the largest for which this is at most 5 %.
Ratios need not be normal, only independent. Fewer than six have no such interval. (Order statistics: David and Nagaraja,
Order Statistics, 2003; for benchmarks: Hoefler and Belli, Scientific Benchmarking of Parallel Computing Systems, SC 2015.)
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Ratio", "interval", "paired"]

_OUTSIDE = 0.05


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Where the median lies with at least 95 %, by the ranks of independent `values`; None for fewer than six."""
    count, rank, outside = len(values), 0, 2
    while outside / 2**count <= _OUTSIDE:
        rank += 1
        outside += 2 * math.comb(count, rank)
    ordered = sorted(values)
    return (ordered[rank - 1], ordered[-rank]) if rank else None


@dataclass(frozen=True)
class Ratio:
    """The median of `n` ratios, and where the median of all lies; None where n is too small to say."""

    value: float
    n: int
    interval: tuple[float, float] | None = None

    @property
    def tie(self) -> bool:
        """Whether the interval holds 1.00: which of both is faster was not measured."""
        return self.interval is not None and self.interval[0] <= 1 <= self.interval[1]

    @property
    def cell(self) -> str:
        """For a table that has n in another column: ``0.81``, ``0.81 (0.79 – 0.84)``, ``1.01 (0.98 – 1.02), a tie``."""
        spread = "" if self.interval is None else f" ({self.interval[0]:.2f} – {self.interval[1]:.2f})"
        return f"{self.value:.2f}{spread}" + ", a tie" * self.tie

    @property
    def told(self) -> str:
        """For a sentence: ``0.81 (n = 1)``, ``0.81 (0.79 – 0.84, n = 9)``, ``1.01 (0.98 – 1.02, n = 9, a tie)``."""
        spread = "" if self.interval is None else f"{self.interval[0]:.2f} – {self.interval[1]:.2f}, "
        return f"{self.value:.2f} ({spread}n = {self.n}" + ", a tie" * self.tie + ")"


def paired(mine: Mapping[int, float], other: Mapping[int, float]) -> Ratio:
    """The ratio of seconds of runs, by the number of a run. Raises ``ValueError`` where no number is of both."""
    ratios = [seconds / other[number] for number, seconds in mine.items() if number in other]
    if not ratios:
        raise ValueError(
            f"runs {sorted(mine)} and {sorted(other)} have no number in common: nothing was run side by side"
        )
    return Ratio(statistics.median(ratios), len(ratios), interval(ratios))
