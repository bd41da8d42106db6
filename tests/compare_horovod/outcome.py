"""What a call came to, in a form that one process writes down and another reads; and how alike two of them are."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

__all__ = ["Kind", "Likeness", "Outcome", "alike", "alike_on_ranks"]

_SHOWN = 160  # characters of a value or a message in a report
# Bits of the mantissa: what a different order of summation may change is a few units of the last one.
_MANTISSA = {"float16": 10, "bfloat16": 7, "float32": 23, "float64": 52, "complex64": 23, "complex128": 52}
_UNITS = 4


class Kind(enum.Enum):
    VALUE = "value"
    RAISED = "raised"
    HUNG = "hung"  # no answer within the time limit
    CRASHED = "crashed"  # the process died


@dataclass(frozen=True)
class Outcome:
    """One rank's answer to one call.

    `value` is what :func:`described` makes of a result; `classes` are the names of an exception's classes, its own first.
    """

    kind: Kind
    value: Any = None
    classes: tuple[str, ...] = ()
    message: str = ""

    @classmethod
    def of_value(cls, value: Any) -> Outcome:
        return cls(Kind.VALUE, described(value))

    @classmethod
    def of_exception(cls, error: BaseException) -> Outcome:
        classes = (each.__name__ for each in type(error).__mro__)
        return cls(Kind.RAISED, classes=tuple(name for name in classes if name != "object"), message=str(error))

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Outcome:
        return cls(Kind(fields["kind"]), fields["value"], tuple(fields["classes"]), fields["message"])

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "kind": self.kind.value}

    def __str__(self) -> str:
        """One line: ``float32[2] [1.0, 2.0]``, ``ValueError: …``, ``hung`` or ``crashed``."""
        if self.kind is Kind.RAISED:
            return f"{self.classes[0]}: {' '.join(self.message.split())}"[:_SHOWN]
        return _line(self.value)[:_SHOWN] if self.kind is Kind.VALUE else self.kind.value


def described(value: Any) -> Any:
    """`value` in terms of JSON, exact: numbers keep every bit, tensors their type and shape, containers their class."""
    if isinstance(value, torch.Tensor):
        if value.is_sparse:
            whole = value.detach().coalesce()
            return {"sparse": described(whole.indices()), "values": described(whole.values()), "shape": [*value.shape]}
        flat = value.detach().flatten().tolist()
        numbers = [part for number in flat for part in (number.real, number.imag)] if value.is_complex() else flat
        return {"tensor": str(value.dtype).removeprefix("torch."), "shape": [*value.shape], "numbers": numbers}
    if isinstance(value, (list, tuple)):
        return {type(value).__name__: [described(each) for each in value]}
    if isinstance(value, dict):
        return {"dict": [[repr(key), described(each)] for key, each in value.items()]}
    return value if isinstance(value, (bool, float)) else repr(value)


def _line(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    if "tensor" in value:
        return f"{value['tensor']}{value['shape']} {value['numbers']}"
    if "sparse" in value:
        return f"sparse {_line(value['values'])} at {value['sparse']['numbers']}"
    ((name, parts),) = value.items()
    if name == "dict":
        return "{" + ", ".join(f"{key}: {_line(each)}" for key, each in parts) + "}"
    return f"{name}({', '.join(_line(each) for each in parts)})"


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
