"""Numbers that scripts use in their calls and that have to be alike on all ranks, and what is raised where they are not.

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
    """Averages were to be clipped by a number that each rank has for itself."""


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
    """What ranks have given: from `least` to `greatest`. NaN is above infinity."""

    least: float
    greatest: float

    @classmethod
    def of(cls, greatest: int, minus_least: int) -> Spread:
        """From the maxima of what :func:`said_alike` gave."""
        return cls(_number(-minus_least), _number(greatest))

    @property
    def alike(self) -> bool:
        """Whether all gave the same, but for rounding."""
        if math.isfinite(self.greatest):
            return self.greatest - self.least <= _ALIKE * self.greatest
        return str(self.greatest) == str(self.least)


def said_alike(value: float) -> tuple[int, int]:
    """Two whole numbers in the order of `value`, which is 0 or more, and of its negative.

    The order of such floats is that of their bits. They are rounded to 32 of these.
    """
    (bits,) = struct.unpack("<i", _WORD.pack(min(value, _LARGEST) if math.isfinite(value) else value))
    return bits, -bits


def _number(bits: int) -> float:
    (value,) = _WORD.unpack(struct.pack("<i", bits))
    return float(value)
