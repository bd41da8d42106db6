"""Sums and averages of parts, by hand: what strategies rely on wherever gloo carries them."""

from __future__ import annotations

import pytest
import torch

from comm_core import ReduceOp
from overlap.transport.reduction import combine_all

SUBNORMAL = 1e-45  # of which a third is zero


def _combined(op: ReduceOp, parts: list[torch.Tensor]) -> torch.Tensor:
    out = torch.empty_like(parts[0])
    combine_all(op, parts, out, len(parts))
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_reduced_is_left_as_it_was(dtype: torch.dtype) -> None:
    parts = [torch.tensor([1.0, 2.0], dtype=dtype), torch.tensor([3.0, 4.0], dtype=dtype)]
    assert _combined(ReduceOp.SUM, parts).tolist() == [4.0, 6.0]
    assert [part.tolist() for part in parts] == [[1.0, 2.0], [3.0, 4.0]]


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG])
def test_16_bits_are_rounded_once(op: ReduceOp) -> None:
    """256 + 1 is 256 in bfloat16, and 1 + 1 beside it is not lost."""
    parts = [torch.tensor([value], dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0, 1.0, 1.0)]
    exact = 260.0 if op is ReduceOp.SUM else 52.0
    assert _combined(op, parts).tolist() == torch.tensor([exact]).bfloat16().tolist()


@pytest.mark.parametrize("size", [2, 3, 5, 6, 7, 8])
def test_an_average_is_the_sum_divided_by_the_size(size: int) -> None:
    values = torch.arange(1, 200, dtype=torch.float32)
    average = _combined(ReduceOp.AVG, [values, *(torch.zeros_like(values) for _ in range(size - 1))])
    assert torch.equal(average, values / size)
