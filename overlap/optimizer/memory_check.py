"""Refuses parameters that share memory with others, or are DTensors."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence

from overlap.core.bucket import Slot
from overlap.plan.plan import Updates
from overlap.transport.memory import is_dense

__all__ = ["check_memory"]


log = logging.getLogger("dear")


def check_memory(slots: Sequence[Slot], updates: Updates, rank: int) -> None:
    """Raise ``TypeError`` for a DTensor, and ``ValueError`` for two parameters over one memory where each is moved, or
    updated at a time of its own.

    Whole updates in ``step()`` leave parameters where they are, one after the other: as in one process.
    """
    for slot in slots:
        if type(slot.param).__name__ == "DTensor" or hasattr(slot.param, "device_mesh"):
            raise TypeError(
                f"parameter {slot.name!r} is a DTensor, as fully_shard() and parallelize_module() make them: torch shards "
                "it and reduces its gradient itself; leave one of the two out"
            )
    if not (updates.in_shards or updates is Updates.DEFERRED):
        return
    pair = _overlapping(slots)
    if pair is not None:
        first, second = pair
        what = "has a place of its own" if updates.in_shards else "is updated when it is needed"
        raise ValueError(
            f"parameters {first.name!r} and {second.name!r} are two tensors over one memory, and here each of them {what}; "
            "tie them by using one Parameter in both places (b.weight = a.weight), or take the strategy wfbp"
        )
    shared = [slot.name for slot in slots if slot.param.device.type == "cpu" and slot.param.is_shared()]
    if updates.in_shards and shared and rank == 0:
        log.warning(
            "parameter %r%s in memory that is shared with other processes (share_memory()), and moves to a bucket in the "
            "first step: what others see does not change any more. Copy the parameters there after a step, or take the "
            "strategy wfbp, which leaves them where they are",
            shared[0],
            f" and {len(shared) - 1} more are" if len(shared) > 1 else " is",
        )


def _overlapping(slots: Sequence[Slot]) -> tuple[Slot, Slot] | None:
    """Two slots whose elements share memory. Tensors with gaps may lie between each other's elements; they do not count."""
    extents = []
    for slot in slots:
        param = slot.param
        if param.device.type != "meta" and param.numel() and is_dense(param):
            start = param.data_ptr()
            extents.append((str(param.device), start, start + param.numel() * param.element_size(), slot))
    extents.sort(key=lambda extent: extent[:3])
    for (device, _, stop, slot), (other_device, start, _, other) in itertools.pairwise(extents):
        if device == other_device and start < stop:
            return slot, other
    return None
