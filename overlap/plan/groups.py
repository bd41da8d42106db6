"""Horovod's ``groups``: which tensors are reduced together because the user says so."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from overlap.core.bucket import Slot
from overlap.core.observer import Facts
from overlap.core.strategy import Plan
from overlap.plan.partition import BucketSpec, TensorSpec, layout

__all__ = ["Groups", "members_of", "parse_groups", "plan_groups"]

# How many groups of neighbours in the order of arrival, or the members (slot indices) of each.
Groups = int | tuple[tuple[int, ...], ...]


def parse_groups(num_groups: Any, groups: Any, slots: Sequence[Slot]) -> Groups:
    """Check the two arguments; 0 where the strategy decides alone. Raises ``ValueError``."""
    if num_groups and groups is not None:
        raise ValueError(f"num_groups is {num_groups} and groups is given too: use groups alone")
    chosen = num_groups if groups is None else groups
    if isinstance(chosen, int):
        if chosen < 0:
            raise ValueError(f"groups should be at least 0 and is {chosen}")
        return min(chosen, len(slots))  # more groups than parameters would be empty
    index_of = {id(slot.param): slot.index for slot in slots}
    seen: set[int] = set()
    parsed = []
    if not isinstance(chosen, list | tuple):
        raise ValueError(f"groups should be a number or a list of lists of parameters and is {type(chosen).__name__}")
    for number, group in enumerate(chosen):
        if not isinstance(group, list | tuple) or not all(isinstance(item, torch.Tensor) for item in group):
            raise ValueError(f"groups should be a number or a list of lists of parameters; entry {number} is {group!r}")
        for item in group:
            if id(item) not in index_of:
                raise ValueError(
                    f"groups[{number}] holds a tensor of shape {tuple(item.shape)} that is no parameter of the optimizer"
                )
            if index_of[id(item)] in seen:
                raise ValueError(f"parameter {slots[index_of[id(item)]].name!r} is in groups twice; once is allowed")
            seen.add(index_of[id(item)])
        parsed.append(tuple(index_of[id(item)] for item in group))
    return tuple(group for group in parsed if group)


def members_of(groups: Groups, facts: Facts) -> list[list[int]]:
    """The groups' members that have gradients at all, each in order of arrival."""
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
) -> Plan:
    """A bucket for each group (for each kind of tensor in it), and the `rest`, issued in the order in which they fill."""
    buckets: list[tuple[BucketSpec, bool]] = list(zip(rest.buckets, rest.sharded, strict=True))
    for group in members:
        by_kind: dict[Any, list[int]] = {}
        for index in group:
            by_kind.setdefault(specs[index].kind, []).append(index)
        buckets += [(layout(tensors, specs, world_size), shardable[tensors[0]]) for tensors in by_kind.values()]
    position = {index: place for place, index in enumerate(facts.arrivals)}
    buckets.sort(key=lambda pair: max(position[index] for index in pair[0].tensors))
    return Plan(tuple(spec for spec, _ in buckets), tuple(sharded for _, sharded in buckets))
