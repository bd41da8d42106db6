"""Moves the optimizer's state from the pieces of one plan to those of another, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch

from overlap.core.bucket import Bucket
from overlap.core.shards import Piece, ShardUpdate
from overlap.state.held import held, put
from overlap.state.pieces import is_sliced
from overlap.transport.communicator import Communicator
from overlap.transport.memory import from_flat
from overlap.transport.objects import allgather_object
from overlap.transport.operation import all_gather

__all__ = ["move_state", "packed", "unpacked"]


@dataclass(frozen=True, slots=True)
class OnDevice:
    """A tensor of a device, as it travels: it goes to the parameter's own device, which every rank numbers for itself."""

    host: torch.Tensor


# slot index -> key -> dtype where every element has a value of its own, else the value itself
_Outline = dict[int, dict[str, Any]]


def move_state(
    comm: Communicator,
    order: Iterable[Bucket],
    old: ShardUpdate,
    new: ShardUpdate,
    full: MutableMapping[torch.Tensor, Any],
) -> None:
    """Give the pieces of `new` the state that those of `old`, in the buckets `order`, have on all ranks.

    State of parameters whose new buckets are updated in full by every rank goes to `full`, by parameter. One bucket's state
    is whole in memory at a time. On every rank of `comm`, with the same `order`. Whole parameters keep their owners:
    nothing is sent.
    """
    if old.whole:
        kept = {one.slot.index: state for bucket in order for one, state in held(old, bucket) if state}
        for one in new.pieces:
            if one.slot.index in kept:
                put(new, one, dict(kept[one.slot.index]))
        return
    outline = _merged(allgather_object(comm, _outline(old, order)))
    takers: dict[int, list[Piece]] = {}
    for one in new.pieces:
        takers.setdefault(one.slot.index, []).append(one)
    for bucket in order:
        by_index = {slot.index: slot for slot in bucket.slots}
        states = {slot.index: dict(outline[slot.index]) for slot in bucket.slots if slot.index in outline}
        kinds = {(key, what): None for state in states.values() for key, what in state.items() if _is_dtype(what)}
        for key, dtype in kinds:
            flat = _gathered(comm, bucket, old, key, dtype)
            for slot, offset in zip(bucket.slots, bucket.spec.offsets, strict=True):
                if states.get(slot.index, {}).get(key) is dtype:
                    states[slot.index][key] = flat[offset : offset + slot.param.numel()]
        for index, state in states.items():
            slot = by_index[index]
            if slot.bucket is not None and not slot.bucket.sharded:
                full[slot.param] = {
                    key: _shaped(value, slot.param, outline[index][key]) for key, value in state.items()
                }
            for one in takers.get(index, ()):
                put(new, one, {key: _part(value, one, outline[index][key]) for key, value in state.items()})


def _outline(shards: ShardUpdate, order: Iterable[Bucket]) -> _Outline:
    return {
        one.slot.index: {
            key: value.dtype if is_sliced(key, value, one.stop - one.start) else packed(value)
            for key, value in state.items()
        }
        for bucket in order
        for one, state in held(shards, bucket)
        if state
    }


def packed(value: Any) -> Any:
    """What travels of a `value` that all elements have together."""
    return OnDevice(value.cpu()) if isinstance(value, torch.Tensor) and value.device.type != "cpu" else value


def unpacked(value: Any, param: torch.Tensor) -> Any:
    """A copy of what :func:`packed` was given, for the state of `param`."""
    return value.host.to(param.device) if isinstance(value, OnDevice) else copy.deepcopy(value)


def _merged(outlines: Iterable[_Outline]) -> _Outline:
    merged: _Outline = {}
    for outline in outlines:
        for index, state in outline.items():
            merged.setdefault(index, state)
    return merged


def _gathered(comm: Communicator, bucket: Bucket, shards: ShardUpdate, key: str, dtype: torch.dtype) -> torch.Tensor:
    """One value for every element of the bucket, from all ranks' pieces."""
    flat = torch.zeros(bucket.spec.padded_numel, dtype=dtype, device=bucket.gradients.whole.device)
    offsets = dict(zip((slot.index for slot in bucket.slots), bucket.spec.offsets, strict=True))
    for one, state in held(shards, bucket):
        value = state.get(key)
        if isinstance(value, torch.Tensor) and is_sliced(key, value, one.stop - one.start) and value.dtype is dtype:
            offset = offsets[one.slot.index]
            flat[offset + one.start : offset + one.stop].copy_(value)
    comm.run(all_gather(flat[bucket.own], flat, counts=bucket.shares, label=f"{bucket.label} {key}"))
    return flat


def _part(value: Any, one: Piece, what: Any) -> Any:
    return value[one.start : one.stop].clone() if _is_dtype(what) else unpacked(value, one.slot.param)


def _shaped(value: Any, param: torch.Tensor, what: Any) -> Any:
    return from_flat(value.clone(), param) if _is_dtype(what) else unpacked(value, param)


def _is_dtype(what: Any) -> bool:
    return isinstance(what, torch.dtype)
