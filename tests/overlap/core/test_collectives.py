"""What a bucket issues again: the same operation as long as its arguments are the same objects, and no longer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import comm_core
from overlap.core.bucket import Bucket, Slot
from overlap.core.wire import COLLECTIVES
from overlap.plan.partition import BucketSpec
from overlap.plan.plan import BucketPlan, Placement
from overlap.transport.communicator import Communicator, ReduceOp
from overlap.transport.native import NativeCommunicator


def _bucket(placement: Placement = Placement.SHARD) -> Bucket:
    slot = Slot(0, "weight", torch.nn.Parameter(torch.ones(6)), 0)
    return Bucket(
        0,
        BucketPlan(BucketSpec((0,), (0,), 6, 6, (6,)), placement),
        [slot],
        rank=0,
        world_size=1,
        collectives=COLLECTIVES,
    )


def _wait(issue: Callable[[Any, Bucket], None], comm: _Counted, bucket: Bucket) -> None:
    issue(comm, bucket)
    assert bucket.work is not None
    bucket.work.wait()


class _Counted:
    """A communicator that counts how often arguments are looked at."""

    def __init__(self, comm: Communicator) -> None:
        self._comm, self.looks = comm, 0

    def __getattr__(self, name: str) -> object:
        self.looks += name == "prepare"
        return getattr(self._comm, name)


def test_arguments_are_looked_at_when_they_change() -> None:
    comm = _Counted(NativeCommunicator(comm_core.local()))
    bucket = _bucket()
    for value in (1.0, 2.0, 3.0):
        bucket.gradients.whole.fill_(value)
        _wait(COLLECTIVES.reduce, comm, bucket)
        assert bucket.gradients.shard.eq(value).all()
    assert comm.looks == 1
    bucket.outgoing = torch.full((6,), 7.0)
    _wait(COLLECTIVES.reduce, comm, bucket)
    assert bucket.gradients.shard.eq(7.0).all()
    bucket.op = ReduceOp.SUM
    _wait(COLLECTIVES.reduce, comm, bucket)
    assert comm.looks == 3
    other = _Counted(NativeCommunicator(comm_core.local()))
    _wait(COLLECTIVES.reduce, other, bucket)
    assert (comm.looks, other.looks) == (3, 1)


@pytest.mark.parametrize("placement", [Placement.SHARD, Placement.OWNED])
def test_memory_that_moves_is_found_again(placement: Placement) -> None:
    """``share_memory_()`` leaves the tensors as they are, and their memory is another."""
    comm = _Counted(NativeCommunicator(comm_core.local()))
    bucket = _bucket(placement)
    for step in range(3):
        bucket.gradients.whole.fill_(step)
        _wait(COLLECTIVES.reduce, comm, bucket)
        bucket.parameters.whole.fill_(step)
        _wait(COLLECTIVES.gather, comm, bucket)
        assert bucket.gradients.shard.eq(step).all()
        assert bucket.parameters.whole.eq(step).all()
        moving = (bucket.gradients.whole, bucket.parameters.whole, bucket.gradients.shard)[step]
        moving.share_memory_()
    assert comm.looks == 4  # after the last one nothing is issued


def test_reductions_and_gathers_are_remembered_side_by_side() -> None:
    comm = _Counted(NativeCommunicator(comm_core.local()))
    bucket = _bucket()
    for _ in range(2):
        _wait(COLLECTIVES.reduce, comm, bucket)
        _wait(COLLECTIVES.gather, comm, bucket)
    assert comm.looks == 2
    bucket.incoming = bucket.outgoing = torch.full((6,), 5.0)
    bucket.plan = BucketPlan(bucket.spec)
    _wait(COLLECTIVES.reduce, comm, bucket)
    assert comm.looks == 3
    assert bucket.outgoing.eq(5.0).all()
