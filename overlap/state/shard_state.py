"""The part of the optimizer's state that this rank holds: cut out, moved to new buckets, compared, exported."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from overlap.core.bucket import Bucket
from overlap.core.shards import ShardUpdate
from overlap.state.held import held, put_master
from overlap.state.pieces import PARAMETER, PieceState, beside, part_of, to_cpu
from overlap.state.reshard import move_state
from overlap.state.share import OUTLINE, StateShare, Which
from overlap.transport.communicator import Communicator
from overlap.transport.memory import to_flat

__all__ = ["ShardState", "export"]


class ShardState:
    """Moves an optimizer's state where buckets come and go: a :class:`overlap.core.feature.StatePlacement`.

    `share` gives it to other ranks.
    """

    def __init__(self, comm: Communicator, optimizer: torch.optim.Optimizer, share: StateShare) -> None:
        self._comm, self._optimizer, self.share = comm, optimizer, share
        self.loaded: dict[torch.Tensor, torch.Tensor] = {}  # masters of parameters that are in no bucket yet

    def placed(self, shards: ShardUpdate, bucket: Bucket) -> None:
        self.cut(shards, bucket, self._optimizer.state)

    def moved(self, order: Iterable[Bucket], old: ShardUpdate, new: ShardUpdate) -> None:
        self.share.take_over()
        move_state(self._comm, order, old, new, self._optimizer.state)

    def updating(self) -> AbstractContextManager[None]:
        return self.share.updating()

    def cut(self, shards: ShardUpdate, bucket: Bucket, full: MutableMapping[torch.Tensor, Any]) -> None:
        """Keep this rank's slices of the full state, and drop the rest of it from `full`."""
        for one in shards.pieces_of(bucket):
            shards.state.pop(one.proxy, None)
            if one.slot.param in full:
                state = full[one.slot.param]
                mine = part_of(state, one.slot.like, one.start, one.stop, whole=shards.whole)
                shards.state[one.proxy] = beside(mine, one.proxy)
        for slot in bucket.slots:
            full.pop(slot.param, None)
        if bucket.master is not None:
            self._take_loaded(shards, bucket)
        shards.written.note(bucket.gradients.shard)

    def load_masters(self, shards: ShardUpdate, masters: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Replace all masters: by this rank's slices of `masters`, and where there is none, by the parameters."""
        self.loaded.clear()
        self.loaded.update(masters)
        for bucket in shards.buckets:
            if bucket.master is not None:
                bucket.master.forget()
                self._take_loaded(shards, bucket)

    def _take_loaded(self, shards: ShardUpdate, bucket: Bucket) -> None:
        for one in shards.pieces_of(bucket):
            value = self.loaded.get(one.slot.param)
            if value is not None:
                put_master(one, value if shards.whole else to_flat(value, one.slot.like)[one.start : one.stop])
        for slot in bucket.slots:
            self.loaded.pop(slot.param, None)


def export(shards: ShardUpdate, which: Which = None) -> PieceState:
    """This rank's pieces and their state, with tensors copied to the CPU, for another rank that builds the full state.

    `which`: as in :meth:`.StateShare.collect`.
    """
    parts: PieceState = {}
    with shards.written.seen():
        if isinstance(which, tuple):
            mine = [one for one in shards.pieces if one.slot.index in which]
            return {one.slot.index: (one.start, one.stop, {PARAMETER: to_cpu(one.elements)}) for one in mine}
        for bucket in shards.buckets:
            for one, state in held(shards, bucket):
                if state and which in (None, OUTLINE, one.slot.index):
                    told = {} if which == OUTLINE else {key: to_cpu(value) for key, value in state.items()}
                    parts[one.slot.index] = (one.start, one.stop, told)
    return parts
