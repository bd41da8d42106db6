"""Refuses parameters that share memory with others, are DTensors, or need more memory than there is."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence

from overlap.core.bucket import Slot
from overlap.job.memory.counted import available_bytes
from overlap.plan.plan import Updates
from overlap.plan.strategy import Strategy
from overlap.state.deferred_init import is_deferred
from overlap.transport.communicator import Communicator
from overlap.transport.memory import is_dense
from overlap.transport.objects import allgather_object

__all__ = ["check_memory", "check_room"]


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


def check_room(comm: Communicator, slots: Sequence[Slot], strategy: Strategy, updates: Updates) -> None:
    """Raise ``MemoryError`` where some rank has no room for parameters that get their values now, and for gradients.

    Not where each rank is to keep its share of both. On every rank of `comm`, with the same deferred parameters.
    """
    waiting = [slot.param.nbytes for slot in slots if is_deferred(slot.param)]
    if not waiting or (updates.in_shards and not strategy.learns):
        return
    needed = sum(waiting) + sum(slot.param.nbytes for slot in slots if slot.param.requires_grad)
    room = allgather_object(comm, available_bytes())
    scarce = min(range(comm.size), key=room.__getitem__)
    if needed > room[scarce]:
        raise MemoryError(
            f"strategy {strategy.name!r} keeps whole parameters and gradients on every rank, which takes "
            f"{needed / 2**20:.0f} MB beside the optimizer's state, and rank {scarce} has {room[scarce] / 2**20:.0f} MB: "
            f"with strategy='fsdp' each rank keeps 1/{comm.size} of them"
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
