"""The numbers that can be tuned, each between two bounds, on a logarithmic scale from 0 to 1 (pure)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Dimension", "Setting", "bounded", "describe", "from_unit", "to_unit"]

Setting = Mapping[str, float]  # a value for each dimension, by its name


@dataclass(frozen=True, slots=True)
class Dimension:
    """One number of a strategy, from `low` to `high`, both above 0; from 1 to 2 is as far as from 64 to 128.

    Raises ``ValueError`` for bounds that are none.
    """

    name: str
    low: float
    high: float
    integer: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.low < self.high < math.inf:
            raise ValueError(
                f"{self.name} should be tuned between two bounds above 0, the lower one first; they are {self.low} and "
                f"{self.high}"
            )

    def position(self, value: float) -> float:
        """Where `value` lies, 0 to 1; what is out of bounds is at the nearer bound."""
        inside = min(max(value, self.low), self.high)
        return math.log(inside / self.low) / math.log(self.high / self.low)

    def value(self, position: float) -> float:
        exact = self.low * (self.high / self.low) ** min(max(position, 0.0), 1.0)
        return min(max(float(round(exact)) if self.integer else exact, self.low), self.high)


def bounded(dimensions: Sequence[Dimension], bounds: Mapping[str, tuple[float, float]]) -> tuple[Dimension, ...]:
    """`dimensions` with the user's own bounds. Raises ``ValueError`` for bounds of something that is not tuned."""
    names = [dimension.name for dimension in dimensions]
    for name in bounds:
        if name not in names:
            raise ValueError(f"there are bounds for {name!r}, and what is tuned is {', '.join(names)}")
    return tuple(
        Dimension(one.name, *bounds[one.name], one.integer) if one.name in bounds else one for one in dimensions
    )


def to_unit(dimensions: Sequence[Dimension], setting: Setting) -> dict[str, float]:
    return {one.name: one.position(setting[one.name]) for one in dimensions}


def from_unit(dimensions: Sequence[Dimension], positions: Mapping[str, float]) -> dict[str, float]:
    return {one.name: one.value(positions[one.name]) for one in dimensions}


def describe(setting: Setting) -> str:
    """A setting as text for logs: ``threshold_mb=12.5``."""
    return ", ".join(f"{name}={value:.4g}" for name, value in setting.items())
