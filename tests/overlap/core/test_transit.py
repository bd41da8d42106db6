"""Parameters on their way: whoever looks at them waits until they are final, on every thread."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import pytest
import torch

from overlap.core.bucket import Bucket, Phase, Slot
from overlap.core.gathering import Transit
from overlap.core.wire import COLLECTIVES
from overlap.plan.partition import BucketSpec


def _transit(buckets: int) -> tuple[Transit, list[Bucket]]:
    """With buckets whose reductions are done, and whose updates are to come."""
    comm: Any = type("Comm", (), {"rank": 0, "size": 1})()
    made = []
    for number in range(buckets):
        slot = Slot(number, str(number), torch.nn.Parameter(torch.zeros(2)), 0)
        spec = BucketSpec((number,), (0,), 2, 2)
        made.append(Bucket(number, spec, [slot], rank=0, world_size=1, holds_parameters=False, collectives=COLLECTIVES))
        made[-1].advance(Phase.REDUCING)
    return Transit([comm], poison=False), made


def test_a_second_thread_waits_until_the_first_one_has_made_the_update() -> None:
    transit, (bucket,) = _transit(1)
    (slot,) = bucket.slots
    seen: list[Future[float]] = []

    def look() -> float:
        transit.arrive(bucket)
        return float(slot.param.detach()[0])

    with ThreadPoolExecutor(1) as pool:

        def update(_bucket: Bucket) -> None:
            seen.append(pool.submit(look))
            with pytest.raises(FutureTimeout):  # it cannot be over
                seen[0].result(timeout=0.05)
            slot.param.data.fill_(1.0)

        transit.leave(bucket, update)
        transit.arrive(bucket)
        assert seen[0].result(timeout=30) == 1.0
    assert bucket.phase is Phase.FILLING
    assert not transit.busy


def test_an_update_may_look_at_the_parameters_that_it_makes() -> None:
    transit, (bucket,) = _transit(1)
    transit.leave(bucket, transit.arrive)
    transit.arrive(bucket)
    assert not transit.busy


def test_each_bucket_is_awaited_by_itself() -> None:
    transit, buckets = _transit(3)
    updated: list[int] = []
    for bucket in buckets:
        transit.leave(bucket, lambda one: updated.append(one.index))
    transit.arrive(buckets[1])
    assert (updated, transit.busy) == ([1], True)
    transit.arrive_all()
    transit.arrive(buckets[0])
    assert (updated, transit.busy) == ([1, 0, 2], False)


def test_an_update_that_fails_is_raised_once_and_the_others_are_made() -> None:
    """Also where it was made before a fork, which has nobody to raise it to."""
    transit, buckets = _transit(2)

    def fail(_bucket: Bucket) -> None:
        raise ValueError("of the update")

    transit.leave(buckets[0], fail)
    transit.leave(buckets[1], lambda _: None)
    transit.settle()
    assert transit.busy
    with pytest.raises(ValueError, match="of the update"):
        transit.arrive_entry()
    transit.arrive_all()
    assert not transit.busy
