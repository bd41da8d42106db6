"""DeAR's plan (Zhang et al., ICDCS 2023, section IV): neighbouring layers share a bucket; the last layers go first. Pure.

policy "rsag"    each rank owns 1/P of every bucket:      reduce-scatter     all-gather
policy "rb"      one rank, in turn, owns a whole bucket:  reduce             broadcast

compute | bwd L3 | bwd L2 | bwd L1 | step  |  fwd L1 | fwd L2 | fwd L3 |
comm             | RS b0  | RS b1  | RS b2 | AG b2 | AG b1  | AG b0  |

[Note: buckets that are all-reduced]
Forward is half as long as backward, and all-gathers take as long as reduce-scatters. Where computation takes about as long
as communication, forward is too short for its half, while backward has time to spare. So a share of the buckets may be
all-reduced under backward: their gradients are gathered, not their parameters, and every rank updates them in full. They
are spread evenly, since forward uses up parameters evenly. A rank keeps their whole optimizer state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from overlap.plan.early import spread
from overlap.plan.fusion import fused_in_order_of_use
from overlap.plan.partition import BucketSpec, TensorSpec, owned
from overlap.plan.plan import BucketPlan, Facts, Placement, Plan, Residency, placed

__all__ = ["plan_buckets"]


def plan_buckets(
    facts: Facts,
    specs: Sequence[TensorSpec],
    shardable: Sequence[bool],
    world_size: int,
    *,
    threshold_bytes: float | None,
    num_nearby_layers: int | None,
    one_owner: bool = False,
    all_reduced: float = 0.0,
    residency: Callable[[BucketSpec], Residency] = lambda _spec: Residency.KEPT,
) -> Plan:
    """Fuse layers in the order of their use in forward; issue the buckets in reverse.

    With `one_owner`, buckets belong to whole ranks in turn, in order of issue. A share of `all_reduced`, from 0 to 1, is
    not sharded: [Note: buckets that are all-reduced]. `residency` is that of all others.
    """
    buckets = fused_in_order_of_use(
        facts, specs, world_size, threshold_bytes=threshold_bytes, num_nearby_layers=num_nearby_layers
    )
    placement = Placement.OWNED if one_owner else Placement.SHARD
    plan = placed(owned(buckets, world_size) if one_owner else buckets, shardable, placement, residency)
    places = [place for place, bucket in enumerate(plan) if bucket.sharded]
    whole = {places[number] for number in spread(len(places), round(all_reduced * len(places)))}
    return tuple(BucketPlan(bucket.spec) if place in whole else bucket for place, bucket in enumerate(plan))
