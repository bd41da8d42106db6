"""Where the values of a bucket lie, and the operation that leads from one placement to another."""

from __future__ import annotations

import itertools

import pytest

from overlap.plan.partition import TensorSpec, layout, owned
from overlap.plan.plan import BucketPlan, Placement, leads, placed, replicated
from overlap.transport.operation import Collective

SPECS = [TensorSpec(16, 4)] * 3
LEADS = {
    (Placement.PARTIAL, Placement.SHARD): Collective.REDUCE_SCATTER,
    (Placement.PARTIAL, Placement.REPLICATED): Collective.ALL_REDUCE,
    (Placement.PARTIAL, Placement.OWNED): Collective.REDUCE,
    (Placement.SHARD, Placement.REPLICATED): Collective.ALL_GATHER,
    (Placement.OWNED, Placement.REPLICATED): Collective.BROADCAST,
}


@pytest.mark.parametrize(("before", "after"), [*itertools.product(Placement, repeat=2)])
def test_one_operation_leads_from_a_placement_to_another(before: Placement, after: Placement) -> None:
    if (before, after) in LEADS:
        assert leads(before, after) is LEADS[before, after]
    else:
        with pytest.raises(ValueError, match=f"no operation leads from {before.name} to {after.name}"):
            leads(before, after)


def test_what_cannot_be_sharded_is_replicated() -> None:
    specs = [layout([index], SPECS, 2) for index in range(3)]
    plan = placed(specs, [True, False, True])
    assert [bucket.placement for bucket in plan] == [Placement.SHARD, Placement.REPLICATED, Placement.SHARD]
    assert [bucket.sharded for bucket in plan] == [True, False, True]
    assert [bucket.sharded for bucket in replicated(specs)] == [False] * 3


def test_an_owned_bucket_knows_its_owner() -> None:
    specs = owned([layout([index], SPECS, 2) for index in range(3)], 2)
    assert [bucket.owner for bucket in placed(specs, [True] * 3, Placement.OWNED)] == [0, 1, 0]
    assert BucketPlan(specs[1], Placement.SHARD).owner is None
