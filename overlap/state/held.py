"""The state of this rank's pieces, where it lies and as scripts see it: by parameter."""

from __future__ import annotations

from typing import Any

import torch

from overlap.core.bucket import Bucket
from overlap.core.shards import Piece, ShardUpdate
from overlap.state.masters import MASTER

__all__ = ["begin_state", "by_parameter", "cuts", "held", "put", "put_master", "set_state"]

_State = dict[str, Any]


def held(shards: ShardUpdate, bucket: Bucket) -> list[tuple[Piece, _State]]:
    """The bucket's pieces on this rank, each with its state (empty before its first update). None of a whole bucket."""
    return [(one, _state_of(shards, one, bucket)) for one in shards.pieces_of(bucket)]


def _state_of(shards: ShardUpdate, one: Piece, bucket: Bucket) -> _State:
    state: _State = shards.state.get(one.proxy, {})
    return state if bucket.master is None else {**state, MASTER: one.proxy.data}


def put(shards: ShardUpdate, one: Piece, state: _State) -> None:
    """Replace the state of a piece."""
    if MASTER in state:
        put_master(one, state.pop(MASTER))
    if state:
        shards.state[one.proxy] = state
    shards.written.note(one.proxy)


def put_master(one: Piece, values: torch.Tensor) -> None:
    """Replace the exact values of a piece whose parameter travels rounded."""
    bucket = one.slot.bucket
    assert bucket is not None, "pieces are of buckets"
    assert bucket.master is not None, "only rounded parameters have masters"
    bucket.master.put(one.proxy.data, values)


# - As `optimizer.state`: by parameter, 1-D tensors as long as the piece, unless pieces are whole


def by_parameter(shards: ShardUpdate) -> dict[torch.Tensor, _State]:
    """The part this rank holds."""
    return {one.slot.param: shards.state[one.proxy] for one in shards.pieces if one.proxy in shards.state}


def cuts(shards: ShardUpdate, param: torch.Tensor) -> bool:
    """Whether `param` is in a bucket whose shards are updated here and on other ranks."""
    return any(slot.param is param for bucket in shards.buckets for slot in bucket.slots)


def set_state(shards: ShardUpdate, param: torch.Tensor, state: _State) -> bool:
    """Replace the state of this rank's piece of `param`, nothing of it for an empty one; whether there is a piece."""
    mine = [one.proxy for one in shards.pieces if one.slot.param is param]
    for proxy in mine:
        shards.state.pop(proxy, None)
        if state:
            shards.state[proxy] = state
        shards.written.note(proxy)
    return bool(mine)


def begin_state(shards: ShardUpdate, param: torch.Tensor, state: _State) -> bool:
    """Let `state`, which is empty still, be that of this rank's piece of `param`; whether there is a piece."""
    mine = [one.proxy for one in shards.pieces if one.slot.param is param]
    for proxy in mine:
        shards.state[proxy] = state
    return bool(mine)
