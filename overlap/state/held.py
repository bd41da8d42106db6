"""The state of this rank's pieces, as it is stored, and by parameter, as scripts see it."""

from __future__ import annotations

from typing import Any

import torch

from overlap.core.bucket import Bucket
from overlap.core.shards import Piece, ShardUpdate
from overlap.state.masters import MASTER
from overlap.state.pieces import beside

__all__ = ["by_parameter", "held", "put", "put_master", "set_state"]

_State = dict[str, Any]


def held(shards: ShardUpdate, bucket: Bucket) -> list[tuple[Piece, _State]]:
    """The bucket's pieces on this rank, each with its state (empty before its first update). None of a whole bucket."""
    return [(one, _state_of(shards, one, bucket)) for one in shards.pieces_of(bucket)]


def _state_of(shards: ShardUpdate, one: Piece, bucket: Bucket) -> _State:
    state: _State = shards.state.get(one.proxy, {})
    return state if bucket.master is None or not bucket.master.told else {**state, MASTER: one.proxy.data}


def put(shards: ShardUpdate, one: Piece, state: _State) -> None:
    """Replace the state of a piece."""
    if MASTER in state:
        put_master(one, state.pop(MASTER))
    if state:
        shards.state[one.proxy] = beside(state, one.proxy)
    shards.written.note(one.proxy)


def put_master(one: Piece, values: torch.Tensor) -> None:
    """Replace the exact values of a piece whose parameter travels rounded."""
    bucket = one.slot.bucket
    assert bucket is not None, "pieces are of buckets"
    assert bucket.master is not None, "only rounded parameters have masters"
    bucket.master.put(one.proxy.data, values)


def set_state(shards: ShardUpdate, one: Piece, state: _State) -> None:
    """Replace the optimizer's own state of a piece; without any, there is none."""
    shards.state.pop(one.proxy, None)
    if state:
        shards.state[one.proxy] = beside(state, one.proxy)
    shards.written.note(one.proxy)


def by_parameter(shards: ShardUpdate) -> dict[torch.Tensor, _State]:
    """The state that this rank holds, by parameter: 1-D tensors as long as the piece, unless pieces are whole."""
    return {one.slot.param: shards.state[one.proxy] for one in shards.pieces if one.proxy in shards.state}
