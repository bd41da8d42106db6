"""Settings and their positions on the scale of the search."""

from __future__ import annotations

import pytest

from overlap.plan.tuning.options import Tuning
from overlap.plan.tuning.space import Dimension, bounded, describe, from_unit, to_unit

MB = Dimension("threshold_mb", 1, 256)


def test_doublings_are_equally_far_apart() -> None:
    assert [MB.position(value) for value in (1, 2, 16, 256)] == pytest.approx([0, 1 / 8, 1 / 2, 1])
    assert [MB.value(position) for position in (0, 0.25, 1)] == pytest.approx([1, 4, 256])


def test_what_is_out_of_bounds_is_at_the_bound() -> None:
    assert (MB.position(0.1), MB.position(1000)) == (0, 1)
    assert (MB.value(-1), MB.value(2)) == (1, 256)


def test_whole_numbers() -> None:
    ahead = Dimension("look_ahead", 1, 9, integer=True)
    assert {ahead.value(position / 10) for position in range(11)} == {1, 2, 3, 4, 5, 6, 7, 9}


def test_settings() -> None:
    dimensions = (MB, Dimension("credit_mb", 1, 4))
    setting = from_unit(dimensions, {"threshold_mb": 0.5, "credit_mb": 0.5})
    assert setting == pytest.approx({"threshold_mb": 16, "credit_mb": 2})
    assert to_unit(dimensions, setting) == pytest.approx({"threshold_mb": 0.5, "credit_mb": 0.5})
    assert describe(setting) == "threshold_mb=16, credit_mb=2"


def test_own_bounds() -> None:
    assert bounded((MB,), {"threshold_mb": (2, 8)}) == (Dimension("threshold_mb", 2, 8),)
    assert bounded((MB,), {}) == (MB,)
    with pytest.raises(ValueError, match="'credit_mb', and what is tuned is threshold_mb"):
        bounded((MB,), {"credit_mb": (1, 2)})
    with pytest.raises(ValueError, match="they are 8 and 2"):
        bounded((MB,), {"threshold_mb": (8, 2)})


@pytest.mark.parametrize(
    ("name", "value"), [("trials", 1), ("warmup", -1), ("window", 0), ("pairs", 0), ("trials", 2.5)]
)
def test_options_without_sense(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} should be a whole number of at least .* and is {value}"):
        Tuning(**{name: value})  # type: ignore[arg-type]
