"""ByteScheduler's plan: a bucket for each layer, numbered by urgency, and its partitions. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from overlap.plan.partition import ALIGNMENT_BYTES, TensorSpec, fuse, round_up
from overlap.plan.plan import Facts, Plan, replicated

__all__ = ["partitions", "plan_buckets"]


def plan_buckets(facts: Facts, specs: Sequence[TensorSpec], world_size: int) -> Plan:
    """A bucket for each layer, in the order in which forward uses them; a bucket's number is its priority.

    Parameters without a gradient in the first iteration get buckets of their own, the last and least urgent.
    """
    used = [tuple(index for index in unit if index not in facts.idle) for unit in facts.units]
    idle = [tuple(index for index in unit if index in facts.idle) for unit in facts.units]
    buckets = [
        bucket
        for units in (used, idle)
        for bucket in fuse([unit for unit in units if unit], specs, world_size, num_nearby_units=1)
    ]
    return replicated(buckets)


def partitions(numel: int, itemsize: int, partition_bytes: int) -> list[slice]:
    """Slices of `numel` elements of flat memory: the fewest aligned ones of at most `partition_bytes`, nearly equal."""
    step = max(1, ALIGNMENT_BYTES // itemsize)
    limit = max(step, partition_bytes // itemsize // step * step)
    number = max(1, -(-numel // limit))
    size = min(limit, round_up(-(-numel // number), step))
    return [slice(start, min(start + size, numel)) for start in range(0, max(numel, 1), size)]
