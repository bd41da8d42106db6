"""Samples that tell whether a gradient is still what was sent."""

from __future__ import annotations

import pytest
import torch

from overlap.features.gradient_check import GradientCheck

NUMELS, STARTS = [5, 1, 0, 100], [0, 5, 6, 6]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex128])
def test_a_changed_gradient_is_named(dtype: torch.dtype) -> None:
    flat = torch.randn(106).to(dtype)
    check = GradientCheck(flat, STARTS, NUMELS)
    assert check.broken() is None  # nothing is sent yet
    check.close()
    assert check.broken() is None
    for place, piece in ((0, 0), (4, 0), (5, 1), (105, 3)):  # ends of the pieces are among the samples
        before = flat[place].clone()
        flat[place] += 1
        assert check.broken() == piece
        flat[place] = before
        assert check.broken() is None
    flat += 1
    assert check.broken() == 0
    check.open()
    assert check.broken() is None
    check.close()
    assert check.broken() is None


def test_values_are_compared_bit_for_bit() -> None:
    flat = torch.tensor([float("nan"), 0.0, 1.0])
    check = GradientCheck(flat, [0, 1, 2], [1, 1, 1])
    check.close()
    assert check.broken() is None  # a NaN is what it was
    flat[1] = -0.0  # which ranks take for the mark of an unused parameter
    assert check.broken() == 1


def test_memory_that_moves_is_followed() -> None:
    flat = torch.arange(8.0)
    check = GradientCheck(flat, [0], [8])
    check.close()
    flat.share_memory_()
    assert check.broken() is None
    flat[0] = 5
    assert check.broken() == 0
