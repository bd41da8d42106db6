"""Which buckets are updated early, how many of them, and when."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from overlap.core.bucket import Phase
from overlap.features.early import EarlyUpdates
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


class _Bucket:
    """Reduced, or not yet; its gathering goes on until `work` is done."""

    sharded = True

    def __init__(self) -> None:
        self.phase, self.done = Phase.REDUCING, True
        self.work = SimpleNamespace(done=lambda: self.done)

    def adopt(self, _strangers: Any) -> None:
        pass


def test_buckets_are_updated_one_by_one_in_the_order_of_issue_when_the_one_before_has_arrived() -> None:
    sent: list[_Bucket] = []

    def send(bucket: _Bucket) -> None:
        bucket.phase, bucket.done = Phase.GATHERING, False
        sent.append(bucket)

    round = SimpleNamespace(quiet=True, settle=lambda buckets: None, on_used=())
    transit, shards = SimpleNamespace(send=send), SimpleNamespace(step=lambda bucket: None)
    states = SimpleNamespace(replacing=contextlib.nullcontext)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1)
    parts: Any = (None, optimizer, round, transit, states)
    policy = EarlyUpdates(*parts)
    first, second, third, last = order = [_Bucket() for _ in range(4)]
    policy.planned(order, shards, [])  # type: ignore[arg-type]

    def gradient(of: Any = third) -> list[_Bucket]:
        policy.gradient(of)
        return sent

    first.done = False
    assert gradient() == []
    first.done = True
    assert gradient(last) == [], "the last reduction comes next"
    round.quiet = False
    assert gradient() == []
    round.quiet = True
    assert gradient() == [first]
    assert gradient() == [first], "its gathering is under way"
    first.done = True
    assert gradient() == [first, second]
