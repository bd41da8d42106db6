"""Which buckets are updated early, and how many of them: pure decisions."""

from __future__ import annotations

import pytest

from overlap.plan.early import next_count, spread


@pytest.mark.parametrize(("candidates", "count"), [(1, 1), (5, 0), (5, 2), (5, 5), (99, 33), (100, 7)])
def test_places_are_spread_evenly(candidates, count):
    places = spread(candidates, count)
    assert len(set(places)) == count
    assert places == sorted(places)
    assert all(0 <= place < candidates for place in places)
    gaps = [after - before for before, after in zip(places, [*places[1:], candidates], strict=False)]
    assert max(gaps, default=0) - min(gaps, default=0) <= 1
    assert not count or places[0] == 0  # the oldest: nothing else is reduced yet


@pytest.mark.parametrize(
    ("planned", "possible", "candidates", "expected"),
    [
        (4, 5, 9, 5),
        (9, 10, 9, 9),
        (4, 4, 9, 4),
        (8, 4, 9, 7),
        (5, 4, 9, 4),
        (1, 0, 9, 0),
        (0, 3, 9, 3),
        (60, 20, 99, 55),
    ],
)
def test_counts_grow_with_the_room_and_shrink_by_parts_of_what_was_too_much(planned, possible, candidates, expected):
    assert next_count(planned, possible, candidates) == expected
