"""How much of a stretch others cover, each moment once."""

from __future__ import annotations

import pytest

from overlap.plan.spans import Spans

SPANS = Spans([(5.0, 6.0), (1.0, 3.0), (2.0, 2.5), (3.0, 4.0)])


@pytest.mark.parametrize(
    ("start", "end", "seconds"),
    [(0, 10, 4.0), (0, 0.5, 0.0), (1.5, 2, 0.5), (3.5, 5.5, 1.0), (4.2, 4.8, 0.0), (6, 9, 0.0), (9, 0, 0.0)],
)
def test_what_is_covered_counts_once(start: float, end: float, seconds: float) -> None:
    assert SPANS.covered(start, end) == pytest.approx(seconds)


def test_nothing_covers_nothing() -> None:
    assert Spans([]).covered(0.0, 1.0) == 0.0
