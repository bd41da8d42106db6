"""Turns measured backward times into buckets: which tensors are merged, and when each reduction is expected. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mgwfbp.merge import Group, least_bytes, merge
from overlap.plan.cost_model import CostModel
from overlap.plan.partition import BucketSpec, TensorSpec, layout
from overlap.plan.plan import Facts, Plan, replicated

__all__ = ["completed", "durations", "plan_buckets", "reordered", "table"]


def durations(order: Sequence[int], moments: Sequence[float]) -> list[float]:
    """Backward seconds between each gradient of `order` and the one before it; `moments` are by tensor, or empty.

    The first counts from the moment 0. A gradient cannot be sent before its predecessors, so none is negative.
    """
    seconds, now = [], 0.0
    for index in order:
        later = max(now, moments[index]) if moments else now
        seconds.append(later - now)
        now = later
    return seconds


def completed(seconds: Mapping[int, float], facts: Facts) -> tuple[float, ...]:
    """The moment at which each tensor's gradient is complete, from the backward time of each (`seconds`).

    All tensors count, also those that are reduced apart and are not in ``facts.arrivals``: backward computes them, too.
    """
    known = [index for index in facts.arrivals if index in seconds]
    if facts.moments:
        known = sorted(seconds, key=lambda index: facts.moments[index])
    moments, now = [0.0] * len(facts.fires), 0.0
    for index in known:
        now += seconds[index]
        moments[index] = now
    return tuple(moments)


def reordered(facts: Facts, moments: Mapping[int, float]) -> Facts:
    """A copy of `facts` with gradients in the order, and with the times, of `moments` (by tensor).

    A tensor that is not there stays behind the one it was behind.
    """
    placed, now = [], 0.0
    for position, index in enumerate(facts.arrivals):
        now = moments.get(index, now)
        placed.append((now, position, index))
    placed.sort()
    last = placed[-1][0] if placed else 0.0
    by_index = {index: moment for moment, _, index in placed}
    num_slots = len(facts.fires)
    return replace(
        facts,
        arrivals=tuple(index for _, _, index in placed),
        moments=tuple(by_index.get(index, last) for index in range(num_slots)),
    )


def plan_buckets(
    facts: Facts,
    specs: Sequence[TensorSpec],
    world_size: int,
    cost: CostModel,
    *,
    seconds: Mapping[int, float] | None = None,
    asc: bool = False,
    merge_below: float = 0,
) -> tuple[Plan, tuple[Group, ...]]:
    """Buckets in order of issue, and the expected times of those with gradients in every iteration.

    Args:
        facts: `arrivals` is the order in which gradients are complete, `moments` when.
        specs: of all tensors; what they take on the wire counts.
        seconds: backward time by tensor instead of what `facts` say; 0 where a tensor is not in it.
        cost, asc, merge_below: see :func:`mgwfbp.merge.merge`; without `merge_below` (and `asc`),
            :func:`mgwfbp.merge.least_bytes` decides.

    Parameters without a gradient in the first iteration would keep others waiting: they get buckets of their own,
    issued last.
    """
    used = [index for index in facts.arrivals if index not in facts.idle]
    idle = [index for index in facts.arrivals if index in facts.idle]
    times = durations(used, facts.moments if seconds is None else completed(seconds, facts))
    if not (asc or merge_below):
        kinds = [specs[index].kind for index in used]
        merge_below = least_bytes([specs[index].wire_nbytes for index in used], times, cost, kinds=kinds)
    expected = _groups(used, times, specs, cost, asc, merge_below)
    buckets = _buckets(used, expected, specs, world_size)
    buckets += _buckets(idle, _groups(idle, [0.0] * len(idle), specs, cost, asc, merge_below), specs, world_size)
    return replicated(buckets), expected


def _groups(
    order: Sequence[int],
    seconds: Sequence[float],
    specs: Sequence[TensorSpec],
    cost: CostModel,
    asc: bool,
    merge_below: float,
) -> tuple[Group, ...]:
    nbytes, kinds = [specs[index].wire_nbytes for index in order], [specs[index].kind for index in order]
    return merge(nbytes, seconds, cost, asc=asc, merge_below=merge_below, kinds=kinds)


def _buckets(
    order: Sequence[int], groups: Sequence[Group], specs: Sequence[TensorSpec], world_size: int
) -> list[BucketSpec]:
    return [layout([order[position] for position in group.tensors], specs, world_size) for group in groups]


def table(groups: Sequence[Group], cost: CostModel, since: str = "backward began") -> str:
    """The plan as a table: a line for each bucket, MB on the wire, and times in ms after `since`."""
    tensors = sum(len(group.tensors) for group in groups)
    lines = [
        f"mgwfbp: {tensors} tensors in {len(groups)} buckets; an all-reduce costs {cost.alpha * 1e3:.3f} ms and "
        f"{cost.beta * 1e9:.3f} ms per 10^6 bytes, and holds up backward for {cost.handling * 1e3:.3f} ms; "
        f"below, ms after {since}",
        f"{'bucket':>6} {'tensors':>7} {'MB':>9} {'ready':>9} {'sent':>9} {'done':>9}",
    ]
    for number, group in enumerate(groups):
        times = f"{group.ready * 1e3:9.3f} {group.start * 1e3:9.3f} {group.end * 1e3:9.3f}"
        lines.append(f"{number:6d} {len(group.tensors):7d} {group.nbytes / 2**20:9.3f} {times}")
    if groups:
        exposed = groups[-1].end - groups[-1].ready
        lines.append(
            f"the last gradient is ready {groups[-1].ready * 1e3:.3f} ms after {since}; reductions outlast it by "
            f"{exposed * 1e3:.3f} ms"
        )
    return "\n".join(lines)
