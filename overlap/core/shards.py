"""Applies the user's own optimizer to the parameters, or the slices of them, that this rank owns.

A shadow of the optimizer (same class, same hyper-parameters, other parameters) steps pieces: piece = parameter ∩ shard,
1-D, or a whole parameter of its own shape where shards end with parameters. Each rank holds the optimizer state of its
pieces only (ZeRO stage 1: Rajbhandari et al., 2020, section 5.1).

A second optimizer of the user's class, with the same attributes: it updates what the first one is not asked to.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from overlap.core.bucket import Bucket, Slot
from overlap.core.once import Once, unhooked_step
from overlap.plan.partition import pieces
from overlap.transport.cuda.streams import LastUpdate
from overlap.transport.memory import view_like

__all__ = ["Piece", "ShardUpdate", "shadow_of"]


@dataclass(slots=True, eq=False)
class Piece:
    """The slice [start, stop) of a flattened parameter that this rank updates."""

    slot: Slot
    start: int
    stop: int
    proxy: torch.nn.Parameter  # shares memory with the parameter, or with its master
    gradient: torch.Tensor  # shares memory with the bucket's reduced shard

    @property
    def elements(self) -> torch.Tensor:
        """The memory of `proxy`, 1-D: what a whole parameter is of another shape, or laid out otherwise."""
        return self.proxy.data.as_strided((self.stop - self.start,), (1,))


class ShardUpdate:
    """The pieces of all sharded buckets on this rank, and the shadow optimizer that updates them.

    `whole`: no shard cuts a parameter.

    Where the optimizer is of a type that we do not know, it updates them itself, through `once`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, once: Once | None = None, *, whole: bool = False) -> None:
        self._optimizer, self.once, self.whole = optimizer, once, whole
        self._shadow = shadow_of(optimizer)
        self._shadow.state = defaultdict(dict)
        self._step = unhooked_step(optimizer)
        self.written = LastUpdate()
        self._pieces: dict[Bucket, list[Piece]] = {}

    def fresh(self) -> ShardUpdate:
        """The same updates, of no bucket yet."""
        return ShardUpdate(self._optimizer, self.once, whole=self.whole)

    @property
    def pieces(self) -> Iterable[Piece]:
        return (one for pieces in self._pieces.values() for one in pieces)

    @property
    def state(self) -> MutableMapping[torch.Tensor, dict[str, Any]]:
        """The state of each piece that was updated, by its proxy."""
        return self._shadow.state

    @property
    def buckets(self) -> Iterable[Bucket]:
        """The buckets that are updated here, in the order in which they came."""
        return self._pieces

    def pieces_of(self, bucket: Bucket) -> list[Piece]:
        """The bucket's pieces on this rank; none of a bucket that is not updated in shards."""
        return self._pieces.get(bucket, [])

    def add(self, bucket: Bucket, rank: int) -> None:
        """Take on the pieces of a new bucket."""
        numels = [slot.param.numel() for slot in bucket.slots]
        parts = pieces(bucket.spec, numels, bucket.own)
        if rank == 0:  # somebody must hold the state of what has no elements
            parts += [(place, (0, 0), slice(0, 0)) for place, numel in enumerate(numels) if numel == 0]
        mine = self._pieces[bucket] = []
        for place, extent, inside in parts:
            slot = bucket.slots[place]
            values = self._piece_of(bucket.shard.data, inside, slot.like)
            gradient = self._piece_of(bucket.gradients.shard, inside, slot.like)
            mine.append(Piece(slot, *extent, torch.nn.Parameter(values), gradient))

    def _piece_of(self, shard: torch.Tensor, inside: slice, like: torch.Tensor) -> torch.Tensor:
        return view_like(shard, int(shard.storage_offset()) + inside.start, like) if self.whole else shard[inside]

    def release(self, bucket: Bucket) -> None:
        """The bucket's parameters are in other buckets: its pieces keep their state, and no memory of its own."""
        if bucket.master is None:
            for one in self.pieces_of(bucket):
                one.proxy.data = one.gradient = one.proxy.data.new_empty(0)

    def take(self, bucket: Bucket) -> None:
        """Give the bucket's pieces their reduced gradients; those that no rank used get None and are left alone."""
        for one in self._pieces[bucket]:
            one.proxy.grad = None if one.slot.unused else one.gradient

    def step(self, buckets: Sequence[Bucket]) -> None:
        """Update the pieces of `buckets`, at least one, in one call with the hyper-parameters in force now."""
        for bucket in buckets:
            if bucket.master is not None:
                bucket.master.follow()
        pieces = self._pieces[buckets[0]] if len(buckets) == 1 else self._of(buckets)
        by_group: dict[int, list[torch.nn.Parameter]] = {}
        for one in pieces:
            if one.proxy.grad is not None:
                by_group.setdefault(one.slot.group, []).append(one.proxy)
        if by_group and self.once is not None:
            self.once.part(self.state, by_group)
        elif by_group:
            groups = self._optimizer.param_groups
            self._shadow.param_groups = [{**groups[index], "params": proxies} for index, proxies in by_group.items()]
            self._step(self._shadow)
        if buckets[-1].gradients.shard.is_cuda:
            self.written.note(buckets[-1].gradients.shard)
        for one in pieces:
            one.proxy.grad = None

    def wrote(self) -> None:
        """Others than an update have written to pieces, on this thread's stream: who is asked for them reads that."""
        for one in self.pieces:
            self.written.note(one.proxy)
            return

    def _of(self, buckets: Iterable[Bucket]) -> list[Piece]:
        return [one for bucket in buckets for one in self._pieces[bucket]]

    def gradients(self, wanted: Callable[[torch.Tensor], bool]) -> list[torch.Tensor]:
        """The reduced gradients of this rank's pieces whose parameter is `wanted`."""
        return [one.proxy.grad for one in self.pieces if one.proxy.grad is not None and wanted(one.slot.param)]

    def gradients_of(self, bucket: Bucket) -> list[torch.Tensor]:
        """The reduced gradients of the bucket's used pieces on this rank."""
        return [one.gradient for one in self._pieces[bucket] if one.proxy.grad is not None]


def shadow_of(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """An optimizer that shares all attributes with `optimizer`, its state and groups too, and has no hooks.

    ``copy.copy`` keeps ``defaults``, ``state`` and ``param_groups`` only, as torch pickles no more of an optimizer; a
    class may have set attributes of its own.
    """
    shadow: torch.optim.Optimizer = object.__new__(type(optimizer))
    vars(shadow).update(vars(optimizer))
    for name, hooks in vars(optimizer).items():
        if name.startswith("_optimizer_") and isinstance(hooks, OrderedDict):
            setattr(shadow, name, OrderedDict())
    return shadow
