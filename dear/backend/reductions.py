"""Reductions by torch's names: those that comm_core has, and those that ranks make from everybody's elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from comm_core import ReduceOp, Unsupported

__all__ = ["Combine", "combine", "engine_op", "pairwise", "premultiplied"]

#: Makes one tensor of two.
Combine = Callable[[Tensor, Tensor], Tensor]

_PREMULTIPLIED = "PREMUL_SUM"
_OPS = {
    "SUM": ReduceOp.SUM,
    "AVG": ReduceOp.AVG,
    "PRODUCT": ReduceOp.PROD,
    "MIN": ReduceOp.MIN,
    "MAX": ReduceOp.MAX,
    _PREMULTIPLIED: ReduceOp.SUM,
}
_PAIRWISE: dict[str, Combine] = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}


def pairwise(op: Any) -> Combine | None:
    """How two tensors are combined by a torch ``ReduceOp`` that comm_core has not; None: it has it (:func:`engine_op`)."""
    return _PAIRWISE.get(_name(op))


def engine_op(op: Any) -> ReduceOp:
    """comm_core's for a torch ``ReduceOp``. Raises ``Unsupported`` for one that is unknown here."""
    name = _name(op)
    if name not in _OPS:
        raise Unsupported(f'reductions over "dear" are one of {", ".join((*_OPS, *_PAIRWISE))}, got {name}')
    return _OPS[name]


def premultiplied(op: Any, source: Tensor) -> Tensor:
    """What is reduced in place of `source`: that, times the factor of a PREMUL_SUM."""
    if _name(op) != _PREMULTIPLIED:
        return source
    if not hasattr(op, "factor"):
        raise Unsupported(
            "this version of torch does not tell the factor of a PREMUL_SUM; multiply, and reduce with SUM"
        )
    return source * op.factor


def combine(pair: Combine, rows: Tensor, out: Tensor) -> None:
    """Reduce `rows`, one from each rank, into the flat `out`, in the order of ranks."""
    total = rows[0]
    for row in rows[1:]:
        total = pair(total, row)
    out.copy_(total)


def _name(op: Any) -> str:
    return str(getattr(op, "op", op).name)
