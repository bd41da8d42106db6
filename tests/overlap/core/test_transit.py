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
from overlap.plan.plan import BucketPlan


def _transit(buckets: int) -> tuple[Transit, list[Bucket]]:
    """With buckets whose reductions are done, and whose updates are to come."""
    comm: Any = type("Comm", (), {"rank": 0, "size": 1})()
    made = []
    for number in range(buckets):
        slot = Slot(number, str(number), torch.nn.Parameter(torch.zeros(2)), 0)
        spec = BucketSpec((number,), (0,), 2, 2)
        made.append(Bucket(number, BucketPlan(spec), [slot], rank=0, world_size=1, collectives=COLLECTIVES))
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


class _OnDevice:
    """A gather that a device has yet to pass."""

    def __init__(self) -> None:
        self.arrivals, self.past = 0, False

    def arrive(self) -> bool:
        self.arrivals += 1
        return not self.past

    def wait(self) -> None:
        raise AssertionError("the host waits for nothing")


def _sent_on_device() -> tuple[Transit, Bucket, _OnDevice]:
    transit, (bucket,) = _transit(1)
    work: Any = _OnDevice()
    bucket.collectives = type("Collectives", (), {"gather": lambda *_: setattr(bucket, "work", work)})()
    bucket.advance(Phase.REDUCED)
    transit.send(bucket)
    return transit, bucket, work


def test_on_a_device_who_looks_later_waits_too_until_it_is_past_the_gather() -> None:
    transit, bucket, work = _sent_on_device()
    for arrivals in (1, 2):
        assert transit.busy
        transit.arrive(bucket)
        assert work.arrivals == arrivals
    work.past = True
    transit.arrive(bucket)
    assert not transit.busy
    transit.arrive(bucket)
    assert work.arrivals == 3


def test_the_next_gather_is_awaited_in_place_of_the_last() -> None:
    transit, bucket, first = _sent_on_device()
    transit.arrive(bucket)
    bucket.advance(Phase.REDUCING)
    transit.leave(bucket, lambda _: None)
    transit.arrive(bucket)
    assert first.arrivals == 1
    assert not transit.busy
