"""How short a round may be that hides its exchange."""

from __future__ import annotations

import pytest

from co2.pace import Pace, explained, hiding


@pytest.mark.parametrize(
    ("step", "exchange", "steps"),
    [(0.01, 0.035, 4), (0.01, 0.04, 4), (0.01, 0.001, 1), (0.5, 0.0, 1), (0.0, 1.0, 1), (0.25, 3.0, 12)],
)
def test_the_smallest_number_of_steps_that_take_as_long(step: float, exchange: float, steps: int) -> None:
    assert hiding(step, exchange) == steps


def test_medians_of_the_last_rounds() -> None:
    pace = Pace()
    assert pace.rounds == 0
    for seconds in (9.0, 9.0, *(0.1,) * 8, 7.0):
        pace.stepped(seconds)
    assert pace.rounds == 0
    for seconds in (0.3, 5.0, 0.2):
        pace.exchanged(seconds, 0)
    assert (pace.rounds, pace.step, pace.exchange) == (3, 0.1, 0.3)


def test_what_takes_longest_counts() -> None:
    pace = Pace()
    for what, seconds in ((0, 1.0), (1, 3.0), (0, 1.2), (1, 2.0), (0, 9.0), (1, 2.5)):
        pace.exchanged(seconds, what)
    assert pace.exchange == 2.5


def test_what_is_explained() -> None:
    short = explained(4, 3, 0.01, 0.035, 3 * 2**20)
    assert short.splitlines() == [
        "co2 on 4 ranks, as measured here",
        "  step      10 ms",
        "  exchange  35 ms: a reduce-scatter and an all-gather of 3 MB",
        "  hidden    no: 3 steps take 30 ms; outer_frequency=4 hides it",
    ]
    assert explained(4, 12, 0.01, 0.035, 0).endswith("yes: 12 steps take 120 ms, and 4 would do")
    full = explained(4, 3, 0.01, 0.035, 0, "overlap_steps", "an all-gather", most=3)
    assert full.endswith("no: 4 steps would, and 3 fit between two; a larger outer_frequency makes room for them")
    assert explained(4, 3, 0.01, 0.035, 0, "overlap_steps", most=4).endswith("overlap_steps=4 hides it")
