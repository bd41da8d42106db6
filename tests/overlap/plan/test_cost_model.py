"""Fits recover what generated the samples, and never leave what a network can be."""

from __future__ import annotations

import pytest

from overlap.plan.cost_model import CostModel, fit

SIZES = [4096 * 4**power for power in range(6)]


@pytest.mark.parametrize(("alpha", "beta"), [(2e-4, 8e-9), (1e-5, 1e-10), (0.0, 1e-9), (3e-3, 0.0)])
def test_exact_samples_give_the_model_back(alpha: float, beta: float) -> None:
    found = fit([(size, alpha + beta * size) for size in SIZES])
    assert found.alpha == pytest.approx(alpha, rel=1e-6, abs=1e-12)
    assert found.beta == pytest.approx(beta, rel=1e-6, abs=1e-18)


def test_noise_of_large_messages_does_not_drown_the_start_up_time() -> None:
    noise = [1.0, 1.02, 0.97, 1.03, 0.98, 1.04]
    found = fit([(size, (2e-4 + 8e-9 * size) * factor) for size, factor in zip(SIZES, noise, strict=True)])
    assert found.alpha == pytest.approx(2e-4, rel=0.1)
    assert found.beta == pytest.approx(8e-9, rel=0.1)


def test_neither_parameter_goes_below_zero() -> None:
    steep = fit([(1000, 1e-6), (2000, 4e-6), (4000, 16e-6)])
    assert steep.alpha == 0
    assert steep.beta > 0
    falling = fit([(1000, 3e-6), (2000, 2e-6), (4000, 1e-6)])
    assert falling.beta == 0
    assert falling.alpha > 0


def test_merging_saves_exactly_alpha() -> None:
    cost = CostModel(1e-3, 1e-9)
    assert cost.seconds(10) + cost.seconds(20) - cost.seconds(30) == pytest.approx(1e-3)
    assert cost.seconds(0) == 0


def test_bad_numbers() -> None:
    with pytest.raises(ValueError, match=r"alpha should be at least 0 and finite and is -1"):
        CostModel(-1, 0)
    with pytest.raises(ValueError, match=r"beta should be at least 0 and finite and is inf"):
        CostModel(0, float("inf"))
    with pytest.raises(ValueError, match=r"two sizes and got \[5\]"):
        fit([(5, 1.0), (5, 2.0)])
    with pytest.raises(ValueError, match=r"\(5, 0\.0\)"):
        fit([(5, 0.0), (6, 1.0)])
