"""What a call came to, in a form that is written down by one process and read by another."""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass
from typing import Any

import torch

__all__ = ["Kind", "Outcome", "described"]

_SHOWN = 160  # characters of a value or a message in a report


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
