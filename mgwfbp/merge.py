"""MG-WFBP's merge rule (Shi, Chu and Li, INFOCOM 2019; TPDS 2021) and its ASC variant (Shi et al., INFOCOM 2021). Pure.

backward | b0 | b1 | b2 |   b3   |           ready[i]: the end of b_i
comm          | c0 .. |  c1 ..   | c2+3 ..   start: the gradients are ready and the link is free

Tensors are numbered in the order in which backward completes their gradients, 0 first.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from overlap.plan.cost_model import CostModel

__all__ = ["Group", "least_bytes", "merge", "predict"]


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors that are reduced together, and when the model expects that, in seconds after backward began."""

    tensors: tuple[int, ...]
    nbytes: int
    ready: float
    start: float
    end: float


def merge(
    nbytes: Sequence[int],
    seconds: Sequence[float],
    cost: CostModel,
    *,
    asc: bool = False,
    merge_below: float = 0,
    kinds: Sequence[Hashable] | None = None,
) -> tuple[Group, ...]:
    """Decide which neighbours are reduced together; groups in order of issue.

    A group takes in the next tensor if its own reduction could not be over when that tensor is ready, and either could
    not even have begun, so that merging delays nothing, or would have begun less than `cost.alpha` before, so that
    waiting costs less than another start.

    Args:
        nbytes: size of each tensor.
        seconds: backward time from the tensor before to this one.
        cost: of one reduction.
        asc: merge only where merging delays nothing.
        merge_below: a group of fewer bytes is merged with the next tensor in any case (not with `asc`).
        kinds: tensors of different kinds are never merged.

    Raises ``ValueError`` where the sequences do not fit together or a time is negative.
    """
    if len(nbytes) != len(seconds) or (kinds is not None and len(kinds) != len(nbytes)):
        raise ValueError(
            f"each tensor needs a size, a time and a kind: got {len(nbytes)} sizes, {len(seconds)} times"
            + ("" if kinds is None else f", {len(kinds)} kinds")
        )
    if any(value < 0 for value in seconds):
        raise ValueError(f"backward times should not be negative; the smallest is {min(seconds)} seconds")
    groups: list[Group] = []
    members: list[int] = []
    held, now, free = 0, 0.0, 0.0
    for index, (size, duration) in enumerate(zip(nbytes, seconds, strict=True)):
        members.append(index)
        held += size
        now += duration
        start = max(free, now)
        end = start + cost.seconds(held)
        if index + 1 < len(nbytes):
            following = now + seconds[index + 1]
            delays_nothing = start > following
            cheaper = not asc and (following - start < cost.alpha)
            too_small = not asc and held < merge_below
            mergeable = kinds is None or kinds[index] == kinds[index + 1]
            if mergeable and ((following < end and (delays_nothing or cheaper)) or too_small):
                continue
        groups.append(Group(tuple(members), held, now, start, end))
        members, held, free = [], 0, end
    return tuple(groups)


def predict(groups: Sequence[Sequence[int]], nbytes: Sequence[int], seconds: Sequence[float], cost: CostModel) -> float:
    """Seconds from the beginning of backward to the end of the last reduction, for any groups in order of issue.

    Backward stands still for `cost.handling` whenever a reduction is issued.
    """
    ready: list[float] = []
    for duration in seconds:
        ready.append((ready[-1] if ready else 0.0) + duration)
    free = 0.0
    for number, group in enumerate(groups, 1):
        start = max(free, max(ready[index] for index in group) + number * cost.handling)
        free = start + cost.seconds(sum(nbytes[index] for index in group))
    return free


def least_bytes(
    nbytes: Sequence[int], seconds: Sequence[float], cost: CostModel, *, kinds: Sequence[Hashable] | None = None
) -> int:
    """The `merge_below` by which all is expected to end first: 0, or a power of two from 1 KB to the whole model.

    The published rule knows what a start costs the link and lets a reduction that the link has time for go alone. Where
    there are many, it is the thread that computes which pays for them (`cost.handling`). Arguments as of :func:`merge`.
    """
    if cost.handling == 0:
        return 0
    choices = [0, *(2**power for power in range(10, max(10, sum(nbytes).bit_length()) + 1))]

    def end(merge_below: int) -> float:
        groups = merge(nbytes, seconds, cost, merge_below=merge_below, kinds=kinds)
        return predict([group.tensors for group in groups], nbytes, seconds, cost)

    return min(choices, key=end)
