"""Which reduction a caller means."""

from __future__ import annotations

from typing import Any

from comm_core import ReduceOp

__all__ = ["Adasum", "Average", "Max", "Min", "Product", "Sum", "resolve"]

Average, Sum, Min, Max, Product = ReduceOp.AVG, ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PROD


class _Adasum:
    """The name exists, so that scripts can mention it."""

    def __repr__(self) -> str:
        return "Adasum"


Adasum = _Adasum()


def resolve(op: Any, average: bool | None = None) -> ReduceOp:
    """The reduction that `op`, or Horovod's older `average`, asks for; an average when neither does.

    Raises ``ValueError`` when both are given and ``NotImplementedError`` for Adasum.
    """
    if average is not None:
        if not isinstance(average, bool):
            raise ValueError(f"average should be True or False and is {average!r}; a reduction is given as op=")
        if op is not None:
            raise ValueError(f"op={op!r} and average={average!r} say the same thing twice; give op alone")
        return Average if average else Sum
    if op is None:
        return Average
    if op is Adasum:
        raise NotImplementedError(
            "Adasum is not offered: it changes what an optimizer computes with every change of the number of ranks, while "
            "everything here equals training in one process; use Average or Sum"
        )
    if not isinstance(op, ReduceOp):
        raise ValueError(f"op should be Average, Sum, Min, Max or Product and is {op!r}")
    return op
