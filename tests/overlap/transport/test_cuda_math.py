"""Casts and inspections by torch's functions, against references in float64 and in integers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import comm_core
from overlap.transport.cuda.math import cast_scale, inspect

HALVES = (torch.bfloat16, torch.float16)


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()])


def _nearest_bfloat16(values: np.ndarray) -> np.ndarray:
    """Ties to even, by integers; the bits."""
    raw = values.astype(np.float32).view(np.uint32)
    return ((raw + 0x7FFF + ((raw >> 16) & 1)) >> 16).astype(np.uint16)


@pytest.mark.parametrize("numel", [0, 1, 3, 4097])
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("dtype", HALVES)
def test_narrowing_rounds_to_the_nearest_ties_to_even(
    numel: int, offset: int, scale: float, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(numel)
    memory = torch.randn(offset + numel, generator=generator)
    source, target = memory[offset:], torch.zeros(offset + numel, dtype=dtype)[offset:]
    cast_scale([target], [source], scale)
    product = (source.double() * scale).numpy()
    halves = product.astype(np.float16).view(np.uint16)
    expected = halves if dtype is torch.float16 else _nearest_bfloat16(product)
    assert np.array_equal(_bits(target).numpy().view(np.uint16), expected)


@pytest.mark.parametrize("dtype", HALVES)
def test_ties_and_values_that_are_not_finite(dtype: torch.dtype) -> None:
    unit = 2.0**-7 if dtype is torch.bfloat16 else 2.0**-10
    source = torch.tensor([1 + unit / 2, 1 + 3 * unit / 2, float("inf"), -float("inf"), float("nan"), 3e38])
    target = torch.empty(6, dtype=dtype)
    cast_scale([target], [source])
    assert target[:2].tolist() == [1.0, 1 + 2 * unit]
    assert target[2:4].tolist() == [float("inf"), -float("inf")]
    assert target[4].isnan()
    assert target[5].isinf() == (dtype is torch.float16)
    back = torch.empty(6)
    cast_scale([back], [target])
    assert torch.equal(back[:4], target[:4].float())
    assert back[4].isnan()


def test_in_place_and_many_at_once() -> None:
    tensors = [
        torch.full((n,), 3.0, dtype=dtype) for n, dtype in ((2, torch.float32), (0, torch.float32), (3, torch.float64))
    ]
    cast_scale(tensors, tensors, 0.5)
    assert [tensor.tolist() for tensor in tensors] == [[1.5, 1.5], [], [1.5, 1.5, 1.5]]
    cast_scale([], [])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_an_inspection_agrees_with_float64(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(n + 1, generator=generator).to(dtype)[1:] for n in (1, 0, 1003)]
    expected = sum(float(tensor.double().square().sum()) for tensor in tensors)
    squares, nonfinite = inspect(tensors).tolist()
    assert squares == pytest.approx(expected, rel=1e-13)
    assert nonfinite == 0
    tensors[2][[0, 7, 9]] = torch.tensor([float("inf"), -float("inf"), float("nan")]).to(dtype)
    assert inspect(tensors)[1] == 3


def test_an_inspection_does_not_overflow_and_may_have_nothing_to_see() -> None:
    assert inspect([torch.full((3,), 3e38)]).tolist() == [pytest.approx(2.7e77, rel=1e-6), 0.0]
    assert inspect([]).tolist() == [0.0, 0.0]
    assert inspect([torch.empty(0)]).tolist() == [0.0, 0.0]


def test_what_cannot_be_done_is_refused() -> None:
    one = torch.ones(1)
    with pytest.raises(comm_core.InvalidUsage, match=r"scale should be above 0 and is 0\.0"):
        cast_scale([one], [one], 0.0)
    with pytest.raises(comm_core.InvalidUsage, match="1 targets for 2 sources"):
        cast_scale([one], [one, one])
    with pytest.raises(comm_core.InvalidUsage, match="has 1 elements on cpu, its source 2 on cpu"):
        cast_scale([one], [torch.ones(2)])
    with pytest.raises(comm_core.InvalidUsage, match=r"got torch\.int32"):
        inspect([torch.ones(1, dtype=torch.int32)])
    with pytest.raises(comm_core.InvalidUsage, match=r"strides \(2,\)"):
        inspect([torch.ones(4)[::2]])
