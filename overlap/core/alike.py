"""Checks that numbers which scripts pass, such as a clipping norm, are alike on all ranks, and raises where not.

They are said in tallies (`overlap.core.tally`), whose numbers are reduced by their maximum. Pure.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["NOTHING", "Clipped", "DifferentScales", "NotAveraged", "Spread", "said_alike"]

_WORD, _LARGEST = struct.Struct("<f"), 3.4e38
_ALIKE = 1e-5  # relative: a norm of the same gradients follows the width of a processor's vectors


class NotAveraged(RuntimeError):
    """The script is about to clip by a number that differs between ranks, such as a norm of its own gradients."""


class DifferentScales(RuntimeError):
    """Ranks have multiplied their losses by different numbers, so none can be taken out of the sum of gradients."""

    def __init__(self, scales: Spread) -> None:
        super().__init__(
            f"ranks have multiplied their losses by different scales, from {scales.least:g} to {scales.greatest:g}, so the "
            "sum of their gradients cannot be unscaled: the GradScaler also steps an optimizer that is not distributed, "
            "and has found infinities on some ranks only. Distribute that optimizer, too, or give it its own GradScaler"
        )


@dataclass(frozen=True, slots=True)
class Clipped:
    """A number that a script clips by, or a part of it: 0 or more. `refuse` gives what to raise where it is not alike."""

    number: float = 0.0
    refuse: Callable[[], NotAveraged] | None = None

    def __add__(self, other: Clipped) -> Clipped:
        """Both: the sum is alike where each of them is."""
        return Clipped(self.number + other.number, self.refuse or other.refuse)


NOTHING = Clipped()


@dataclass(frozen=True, slots=True)
class Spread:
    """The smallest and the largest of the numbers that ranks have given. NaN is above infinity."""

    least: float
    greatest: float

    @classmethod
    def of(cls, greatest: int, minus_least: int) -> Spread:
        """The spread, from the maxima of the numbers that :func:`said_alike` gave."""
        return cls(_number(-minus_least), _number(greatest))

    @property
    def alike(self) -> bool:
        """Whether all ranks gave the same number, apart from rounding."""
        if math.isfinite(self.greatest):
            return self.greatest - self.least <= _ALIKE * self.greatest
        return str(self.greatest) == str(self.least)


def said_alike(value: float) -> tuple[int, int]:
    """Two integers that compare as `value` (0 or more) and its negative do, so that one maximum gives both ends.

    The order of such floats is that of their bits. They are rounded to 32 of these.
    """
    (bits,) = struct.unpack("<i", _WORD.pack(min(value, _LARGEST) if math.isfinite(value) else value))
    return bits, -bits


def _number(bits: int) -> float:
    (value,) = _WORD.unpack(struct.pack("<i", bits))
    return float(value)
