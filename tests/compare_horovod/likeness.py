"""How alike two outcomes are. Pure."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import Any

from tests.compare_horovod.outcome import Kind, Outcome

__all__ = ["Likeness", "alike", "alike_on_ranks"]

# Bits of the mantissa: what a different order of summation may change is a few units of the last one.
_MANTISSA = {"float16": 10, "bfloat16": 7, "float32": 23, "float64": 52, "complex64": 23, "complex128": 52}
_UNITS = 4


class Likeness(enum.IntEnum):
    """The larger, the less alike."""

    EQUAL = 0  # to the bit; of exceptions: who catches the one catches the other
    ROUNDED = 1  # numbers apart by rounding
    DIFFERENT = 2


def alike(theirs: Outcome, ours: Outcome) -> Likeness:
    """Values are compared number by number, of exceptions the class: an ``except`` for theirs has to catch ours."""
    if theirs.kind is not ours.kind:
        return Likeness.DIFFERENT
    if theirs.kind is Kind.RAISED:
        return Likeness.EQUAL if theirs.classes[0] in ours.classes else Likeness.DIFFERENT
    return _values(theirs.value, ours.value)


def alike_on_ranks(theirs: Sequence[Outcome], ours: Sequence[Outcome]) -> Likeness:
    """Of one call on all ranks: as alike as on the rank that differs most."""
    if len(theirs) != len(ours):
        return Likeness.DIFFERENT
    return max(alike(one, other) for one, other in zip(theirs, ours, strict=True))


def _values(theirs: Any, ours: Any) -> Likeness:
    if isinstance(theirs, dict) and isinstance(ours, dict) and theirs.keys() == ours.keys():
        if "tensor" in theirs:
            return _tensors(theirs, ours)
        return max((_values(theirs[key], ours[key]) for key in theirs), default=Likeness.EQUAL)
    if isinstance(theirs, list) and isinstance(ours, list) and len(theirs) == len(ours):
        return max(map(_values, theirs, ours), default=Likeness.EQUAL)
    if type(theirs) is float and type(ours) is float:
        return _numbers([theirs], [ours], "float64")
    return Likeness.EQUAL if (type(theirs), theirs) == (type(ours), ours) else Likeness.DIFFERENT


def _tensors(theirs: dict[str, Any], ours: dict[str, Any]) -> Likeness:
    if (theirs["tensor"], theirs["shape"]) != (ours["tensor"], ours["shape"]):
        return Likeness.DIFFERENT
    return _numbers(theirs["numbers"], ours["numbers"], theirs["tensor"])


def _numbers(theirs: list[Any], ours: list[Any], dtype: str) -> Likeness:
    if repr(theirs) == repr(ours):  # tells zeros of both signs apart, and takes NaN for equal
        return Likeness.EQUAL
    if dtype not in _MANTISSA or len(theirs) != len(ours):
        return Likeness.DIFFERENT
    largest = max((abs(number) for number in theirs if math.isfinite(number)), default=0.0)
    allowed = _UNITS * 2.0 ** -_MANTISSA[dtype] * largest
    near = all(_near(mine, other, allowed) for mine, other in zip(theirs, ours, strict=True))
    return Likeness.ROUNDED if near else Likeness.DIFFERENT


def _near(theirs: float, ours: float, allowed: float) -> bool:
    if not (math.isfinite(theirs) and math.isfinite(ours)):
        return repr(theirs) == repr(ours)
    return abs(theirs - ours) <= allowed
