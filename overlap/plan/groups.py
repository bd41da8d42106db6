"""Horovod's ``groups``: which tensors are reduced together because the user says so."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from overlap.plan.partition import BucketSpec, TensorSpec, layout
from overlap.plan.plan import Facts, Plan, Residency, placed

__all__ = ["Groups", "members_of", "plan_groups"]

# How many groups of neighbours in the order of arrival, or the members (slot indices) of each.
Groups = int | tuple[tuple[int, ...], ...]


def members_of(groups: Groups, facts: Facts) -> list[list[int]]:
    """The members of each group that have gradients at all, in order of arrival."""
    if isinstance(groups, int):
        size, more = divmod(len(facts.arrivals), groups)
        ends = [number * size + min(number, more) for number in range(groups + 1)]
        return [list(facts.arrivals[start:end]) for start, end in itertools.pairwise(ends)]
    position = {index: place for place, index in enumerate(facts.arrivals)}
    return [sorted((index for index in group if index in position), key=position.__getitem__) for group in groups]


def plan_groups(
    members: Sequence[Sequence[int]],
    rest: Plan,
    facts: Facts,
    specs: Sequence[TensorSpec],
    shardable: Sequence[bool],
    world_size: int,
    residency: Callable[[BucketSpec], Residency] = lambda _spec: Residency.KEPT,
) -> Plan:
    """A bucket for each group (for each kind of tensor in it), and the `rest`, issued in the order in which they fill."""
    buckets = list(rest)
    for group in members:
        by_kind: dict[Any, list[int]] = {}
        for index in group:
            by_kind.setdefault(specs[index].kind, []).append(index)
        made = [layout(tensors, specs, world_size) for tensors in by_kind.values()]
        buckets += placed(made, shardable, residency=residency)
    position = {index: place for place, index in enumerate(facts.arrivals)}
    buckets.sort(key=lambda bucket: max(position[index] for index in bucket.spec.tensors))
    return tuple(buckets)
