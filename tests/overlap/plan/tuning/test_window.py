"""A window ignores the first steps and does not mind one long pause."""

from __future__ import annotations

from itertools import accumulate

from overlap.plan.tuning.window import StepWindow


def _measure(warmup: int, length: int, durations: list[float]) -> list[float | None]:
    window = StepWindow(warmup, length, now=100.0)
    return [window.tick(100.0 + end) for end in accumulate(durations)]


def test_first_steps_do_not_count() -> None:
    assert _measure(2, 3, [9.0, 9.0, 1.0, 1.0, 1.0]) == [None] * 4 + [1.0]


def test_a_pause_does_not_count() -> None:
    assert _measure(0, 3, [1.0, 50.0, 1.0])[-1] == 1.0


def test_one_step_is_enough() -> None:
    assert _measure(0, 1, [0.5]) == [0.5]
