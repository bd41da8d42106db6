"""Samples that tell whether a gradient is still what was sent."""

from __future__ import annotations

import pytest
import torch

from overlap.features.gradient_check import Samples

NUMELS, STARTS = [5, 1, 0, 100], [0, 5, 6, 6]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex128])
def test_a_changed_gradient_is_named(dtype: torch.dtype) -> None:
    flat = torch.randn(106).to(dtype)
    samples = Samples(flat.dtype, STARTS, NUMELS)
    samples.take(flat)
    assert samples.broken(flat) is None
    for place, piece in ((0, 0), (4, 0), (5, 1), (105, 3)):  # ends of the pieces are among the samples
        before = flat[place].clone()
        flat[place] += 1
        assert samples.broken(flat) == piece
        flat[place] = before
        assert samples.broken(flat) is None
    flat += 1
    assert samples.broken(flat) == 0
    samples.take(flat)
    assert samples.broken(flat) is None


def test_values_are_compared_bit_for_bit() -> None:
    flat = torch.tensor([float("nan"), 0.0, 1.0])
    samples = Samples(flat.dtype, [0, 1, 2], [1, 1, 1])
    samples.take(flat)
    assert samples.broken(flat) is None  # a NaN is what it was
    flat[1] = -0.0
    assert samples.broken(flat) == 1


def test_memory_that_moves_is_followed() -> None:
    flat = torch.arange(8.0)
    samples = Samples(flat.dtype, [0], [8])
    samples.take(flat)
    flat.share_memory_()
    assert samples.broken(flat) is None
    flat[0] = 5
    assert samples.broken(flat) == 0
