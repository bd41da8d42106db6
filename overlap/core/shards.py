"""The user's own optimizer, applied to the parameters, or the slices of them, that this rank owns.

A shadow of the optimizer (same class, same hyper-parameters, other parameters) steps pieces: piece = parameter ∩ shard,
1-D, or a whole parameter of its own shape where shards end with parameters. Each rank holds the optimizer state of its
pieces only (ZeRO stage 1: Rajbhandari et al., 2020, section 5.1).

A second optimizer of the user's class, with the same attributes: it updates what the first one is not asked to.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch

from overlap.core.bucket import Bucket, Slot
from overlap.features.rounded_parameters import MASTER
from overlap.plan.partition import piece
from overlap.state.pieces import PieceState, part_of, same_state, to_cpu
from overlap.transport.cuda.streams import LastUpdate
from overlap.transport.memory import to_flat, unused_positions, view_like

__all__ = ["Piece", "ShardUpdate", "shadow_of", "unhooked_step"]


def unhooked_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """``type(optimizer).step`` without torch's profiling and step hooks, which run once, around the whole step."""
    step: Any = type(optimizer).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


@dataclass(slots=True, eq=False)
class Piece:
    """The slice [start, stop) of a flattened parameter that this rank updates."""

    slot: Slot
    start: int
    stop: int
    proxy: torch.nn.Parameter  # shares memory with the parameter, or with its master
    gradient: torch.Tensor  # shares memory with the bucket's reduced shard


class ShardUpdate:
    """Pieces of all sharded buckets, and the shadow optimizer that updates them. `whole`: no shard cuts a parameter."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        loaded: dict[torch.Tensor, torch.Tensor] | None = None,
        *,
        whole: bool = False,
    ) -> None:
        self._optimizer, self.whole = optimizer, whole
        self._shadow = shadow_of(optimizer)
        self._shadow.state = defaultdict(dict)
        self._step = unhooked_step(optimizer)
        self._written = LastUpdate()
        self._pieces: dict[Bucket, list[Piece]] = {}
        self._extents: dict[Bucket, tuple[torch.Tensor, list[int]]] = {}
        # Masters of parameters that are in no bucket yet.
        self.loaded: dict[torch.Tensor, torch.Tensor] = {} if loaded is None else loaded

    @property
    def pieces(self) -> Iterable[Piece]:
        return (one for pieces in self._pieces.values() for one in pieces)

    def held(self, bucket: Bucket) -> list[tuple[Piece, dict[str, Any]]]:
        """The bucket's pieces on this rank, each with its state (empty before its first update). None of a whole bucket."""
        return [(one, self._state_of(one, bucket)) for one in self._pieces.get(bucket, ())]

    def _state_of(self, one: Piece, bucket: Bucket) -> dict[str, Any]:
        state: dict[str, Any] = self._shadow.state.get(one.proxy, {})
        return state if bucket.master is None else {**state, MASTER: one.proxy.data}

    def put(self, one: Piece, state: dict[str, Any]) -> None:
        """Replace the state of a piece."""
        if MASTER in state:
            _put_master(one, state.pop(MASTER))
        if state:
            self._shadow.state[one.proxy] = state
        self._written.note(one.proxy)

    @property
    def state(self) -> dict[torch.nn.Parameter, dict[str, Any]]:
        """State by parameter, the part this rank holds: 1-D tensors as long as the piece, unless pieces are whole."""
        return {one.slot.param: self._shadow.state[one.proxy] for one in self.pieces if one.proxy in self._shadow.state}

    def cuts(self, param: torch.Tensor) -> bool:
        """Whether `param` is in a bucket whose shards are updated here and on other ranks."""
        return any(slot.param is param for bucket in self._pieces for slot in bucket.slots)

    def set_state(self, param: torch.Tensor, state: dict[str, Any]) -> bool:
        """Replace the state of this rank's piece of `param`, nothing of it for an empty one; whether there is a piece."""
        mine = [one.proxy for one in self.pieces if one.slot.param is param]
        for proxy in mine:
            self._shadow.state.pop(proxy, None)
            if state:
                self._shadow.state[proxy] = state
            self._written.note(proxy)
        return bool(mine)

    def begin_state(self, param: torch.Tensor, state: dict[str, Any]) -> bool:
        """Let `state`, which is empty still, be that of this rank's piece of `param`; whether there is a piece."""
        mine = [one.proxy for one in self.pieces if one.slot.param is param]
        for proxy in mine:
            self._shadow.state[proxy] = state
        return bool(mine)

    def add(self, bucket: Bucket, rank: int) -> None:
        """Take on the pieces of a new bucket."""
        pieces = []
        for slot, offset in zip(bucket.slots, bucket.spec.offsets, strict=True):
            numel = slot.param.numel()
            shard_numel = bucket.own.stop - bucket.own.start
            extent = piece(offset, numel, bucket.own.start, shard_numel)
            if numel == 0 and rank == 0:
                extent = (0, 0)  # somebody must hold its state
            if extent is None:
                continue
            low, high = offset + extent[0], offset + extent[1]
            inside = slice(low - bucket.own.start, high - bucket.own.start) if numel else slice(0, 0)
            values = self._piece_of(bucket.shard.data, inside, slot.param)
            gradient = self._piece_of(bucket.reduced, inside, slot.param) if numel else values
            pieces.append(Piece(slot, *extent, torch.nn.Parameter(values), gradient))
        self._pieces[bucket] = pieces
        with_elements = [one for one in pieces if one.stop > one.start]
        starts = [int(one.gradient.storage_offset() - bucket.reduced.storage_offset()) for one in with_elements]
        stops = [start + one.gradient.numel() for start, one in zip(starts, with_elements, strict=True)]
        self._extents[bucket] = (torch.tensor(starts, dtype=torch.int64, device=bucket.reduced.device), stops)

    def _piece_of(self, shard: torch.Tensor, inside: slice, param: torch.Tensor) -> torch.Tensor:
        return view_like(shard, int(shard.storage_offset()) + inside.start, param) if self.whole else shard[inside]

    def take(self, bucket: Bucket) -> None:
        """Give the bucket's pieces their reduced gradients; those that no rank used get None and are left alone."""
        starts, stops = self._extents[bucket]
        unused = iter(unused_positions(bucket.reduced, starts, stops))
        for one in self._pieces[bucket]:
            one.slot.unused = next(unused) if one.stop > one.start else one.slot.param.grad is None
            one.proxy.grad = None if one.slot.unused else one.gradient

    def step(self, bucket: Bucket) -> None:
        """Update the bucket's pieces with the hyper-parameters in force now."""
        if bucket.master is not None:
            bucket.master.follow()
        by_group: dict[int, list[torch.nn.Parameter]] = {}
        for one in self._pieces[bucket]:
            if one.proxy.grad is not None:
                by_group.setdefault(one.slot.group, []).append(one.proxy)
        if by_group:
            groups = self._optimizer.param_groups
            self._shadow.param_groups = [{**groups[index], "params": proxies} for index, proxies in by_group.items()]
            self._step(self._shadow)
        self._written.note(bucket.reduced)
        for one in self._pieces[bucket]:
            one.proxy.grad = None

    def gradients(self, wanted: Callable[[torch.Tensor], bool]) -> list[torch.Tensor]:
        """Reduced gradients of the pieces whose parameter is `wanted`, this rank's share of them."""
        return [one.proxy.grad for one in self.pieces if one.proxy.grad is not None and wanted(one.slot.param)]

    def gradients_of(self, bucket: Bucket) -> list[torch.Tensor]:
        """Reduced gradients of the bucket's used pieces on this rank."""
        return [one.gradient for one in self._pieces[bucket] if one.proxy.grad is not None]

    # - State: full (as torch keeps it, by parameter) <-> pieces

    def shard_state(self, bucket: Bucket, full: MutableMapping[torch.Tensor, Any]) -> None:
        """Keep this rank's slices of the full state, and drop the rest of it from `full`."""
        for one in self._pieces[bucket]:
            self._shadow.state.pop(one.proxy, None)
            if one.slot.param in full:
                state = full[one.slot.param]
                self._shadow.state[one.proxy] = part_of(state, one.slot.param, one.start, one.stop, whole=self.whole)
        for slot in bucket.slots:
            full.pop(slot.param, None)
        if bucket.master is not None:
            self._take_loaded(bucket)
        self._written.note(bucket.reduced)

    def load_masters(self, masters: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Replace all masters: by this rank's slices of `masters`, and where there is none, by the parameters."""
        self.loaded.clear()
        self.loaded.update(masters)
        for bucket in self._pieces:
            if bucket.master is not None:
                bucket.master.forget()
                self._take_loaded(bucket)

    def _take_loaded(self, bucket: Bucket) -> None:
        for one in self._pieces[bucket]:
            value = self.loaded.get(one.slot.param)
            if value is not None:
                _put_master(one, value if self.whole else to_flat(value, one.slot.param)[one.start : one.stop])
        for slot in bucket.slots:
            self.loaded.pop(slot.param, None)

    def agrees_with(self, full: Mapping[int, Mapping[str, Any]]) -> bool:
        """Whether this rank's pieces have the state that `full`, by slot, says; masters do not count."""
        with self._written.seen():
            for bucket in self._pieces:
                for one, state in self.held(bucket):
                    said = part_of(full.get(one.slot.index, {}), one.slot.param, one.start, one.stop, whole=self.whole)
                    said.pop(MASTER, None)
                    if not same_state({key: value for key, value in state.items() if key != MASTER}, said):
                        return False
        return True

    def export(self) -> PieceState:
        """This rank's pieces and their state, tensors copied to the CPU; what another rank needs to build full state."""
        parts: PieceState = {}
        with self._written.seen():
            for bucket in self._pieces:
                for one, state in self.held(bucket):
                    if state:
                        copied = {key: to_cpu(value) for key, value in state.items()}
                        parts[one.slot.index] = (one.start, one.stop, copied)
        return parts


def _put_master(one: Piece, values: torch.Tensor) -> None:
    bucket = one.slot.bucket
    assert bucket is not None, "pieces are of buckets"
    assert bucket.master is not None, "only rounded parameters have masters"
    bucket.master.put(one.proxy.data, values)


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
