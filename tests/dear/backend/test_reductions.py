"""Reductions by torch's names."""

from __future__ import annotations

import types

import pytest
import torch
import torch.distributed as dist

from comm_core import ReduceOp, Unsupported
from dear.backend.reductions import combine, engine_op, pairwise, premultiplied


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (dist.ReduceOp.SUM, ReduceOp.SUM),
        (dist.ReduceOp(dist.ReduceOp.AVG), ReduceOp.AVG),
        (dist.ReduceOp.PRODUCT, ReduceOp.PROD),
        (dist.ReduceOp.MIN, ReduceOp.MIN),
        (dist.ReduceOp.MAX, ReduceOp.MAX),
    ],
    ids=lambda value: str(value).rpartition(".")[2] if isinstance(value, ReduceOp) else "of",
)
def test_what_the_engine_reduces(op: object, expected: ReduceOp) -> None:
    assert pairwise(op) is None
    assert engine_op(op) == expected


@pytest.mark.parametrize("options", [dist.AllreduceOptions, dist.ReduceOptions, dist.ReduceScatterOptions])
def test_the_reduction_of_options(options: type) -> None:
    made = options()
    made.reduceOp = dist.ReduceOp.MAX
    assert engine_op(made.reduceOp) == ReduceOp.MAX


@pytest.mark.parametrize(
    ("op", "expected"),
    [(dist.ReduceOp.BAND, 0), (dist.ReduceOp.BOR, 7), (dist.ReduceOp.BXOR, 5)],
    ids=["and", "or", "xor"],
)
def test_bits_are_combined_here(op: object, expected: int) -> None:
    pair = pairwise(op)
    assert pair is not None
    out = torch.zeros(1, dtype=torch.int64)
    combine(pair, torch.tensor([[3], [6], [0]]), out)
    assert out.item() == expected


def test_a_sum_may_have_a_factor() -> None:
    op = dist._make_nccl_premul_sum(0.5)
    if not hasattr(op, "factor"):
        pytest.skip("this torch does not tell it")
    assert premultiplied(op, torch.tensor([4.0])).item() == 2.0
    assert engine_op(op) == ReduceOp.SUM
    tensor = torch.ones(1)
    assert premultiplied(dist.ReduceOp.SUM, tensor) is tensor


def test_others_are_refused_by_name() -> None:
    with pytest.raises(Unsupported, match="UNUSED"):
        engine_op(types.SimpleNamespace(name="UNUSED"))
