"""An optimizer's state in a sharded checkpoint: this rank's pieces of it, named by the model's parameters.

saved()     what this rank has: pieces as chunks of whole tensors, and what it has whole
targets()   where this rank's parts of a checkpoint's tensors are to be read into
take()      what was read becomes the state, once all ranks have read theirs
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from overlap.core.bucket import Slot
from overlap.core.engine import Engine
from overlap.core.shards import Piece
from overlap.state.chunks import Chunked
from overlap.state.elementwise import SCALAR_STATE
from overlap.state.full_state import FullState
from overlap.state.held import held, put_master, set_state
from overlap.state.masters import MASTER
from overlap.state.pieces import is_sliced
from overlap.state.regions import region_of
from overlap.state.saved import Entry, Path, first_few, nest
from overlap.transport.memory import from_flat

__all__ = ["ShardedState", "chunk_of"]


class _Target(NamedTuple):
    """A value of a parameter's state that is read: for this rank's piece of the parameter, or for all of it."""

    slot: Slot
    piece: Piece | None
    path: Path
    entry: Entry
    value: Any


class ShardedState:
    """The state of the user's `optimizer`, whose parameters are those of `engine`, with the `names` of parameters by id.

    Raises ``ValueError`` where a parameter has no name.
    """

    def __init__(
        self, engine: Engine, optimizer: torch.optim.Optimizer, full_state: FullState, names: Mapping[int, str]
    ) -> None:
        self._engine, self._optimizer, self._full_state = engine, optimizer, full_state
        self._names = names
        self._targets: list[_Target] = []
        self._exact: list[_Target] = []
        self._groups: Sequence[Mapping[str, Any]] = ()
        strangers = [slot.name for slot in engine.slots if id(slot.param) not in names]
        if strangers:
            raise ValueError(
                f"the optimizer has parameters that are not the model's: {first_few(strangers)}; pass the model that "
                "has all of them"
            )

    @property
    def groups(self) -> list[list[str]]:
        """The names of each group's parameters."""
        return [[self._names[id(param)] for param in group["params"]] for group in self._optimizer.param_groups]

    # - Saving

    def saved(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The state as ``get_state_dict()`` names it, and exact values of rounded parameters by name. On any rank."""
        state: dict[str, dict[str, Any]] = {}
        exact: dict[str, Any] = {}
        self._full_state.share.take_over()
        shards = self._engine.shards
        if shards is not None:
            with shards.written.seen():
                for one, inside in [pair for bucket in shards.buckets for pair in held(shards, bucket)]:
                    for key, value in inside.items():
                        sliced = not shards.whole and is_sliced(key, value, one.stop - one.start)
                        shown = _chunk(one, value) if sliced else self._whole(one.slot.param, key, value)
                        if key == MASTER and one.slot.freed is not None:
                            continue  # the model has them
                        if key == MASTER:
                            exact[self._names[id(one.slot.param)]] = shown
                        else:
                            state.setdefault(self._names[id(one.slot.param)], {})[key] = shown
        for param, inside in dict(self._optimizer.state).items():
            if id(param) in self._names and inside:
                shown = {key: self._whole(param, key, value) for key, value in inside.items()}
                state[self._names[id(param)]] = shown
        groups = [
            {**{key: value for key, value in group.items() if key != "params"}, "params": names}
            for group, names in zip(self._optimizer.param_groups, self.groups, strict=True)
        ]
        return {"state": state, "param_groups": groups}, exact

    def _whole(self, param: torch.Tensor, key: str, value: Any) -> Any:
        """A `value` of the state that this rank has for all that it has of a parameter.

        Raises ``ValueError`` where that is a part, and the value is of another shape: nobody knows which part that is.
        """
        region = region_of(param)
        if not region.divided or key in SCALAR_STATE or not isinstance(value, torch.Tensor):
            return value
        if value.shape == region.local:
            return Chunked.part(value, region)
        if value.numel() != 1:
            raise ValueError(_misfit(self._names[id(param)], key, value.shape, region.local))
        return value

    # - Loading

    def targets(
        self,
        state: Mapping[str, Iterable[tuple[Path, Entry]]],
        exact: Mapping[str, Entry],
        groups: Sequence[Mapping[str, Any]],
    ) -> dict[str, Any]:
        """What is to be read of the saved `state`, and of `exact` values, on this rank, by key.

        `groups`: the hyper-parameters that count from then on.
        """
        self._targets, self._exact, self._groups = [], [], groups
        pieces = self._pieces()
        for slot in self._engine.slots:
            name = self._names[id(slot.param)]
            mine = pieces.get(slot.index)
            cut = slot.bucket is not None and slot.bucket.sharded
            if cut and mine is None:
                continue
            for path, entry in state.get(name, ()):
                self._targets.append(_Target(slot, mine, path, entry, self._room(slot, mine, path, entry)))
            if name in exact and self._engine.strategy.gather_dtype is not None:
                value = self._room(slot, mine, (MASTER,), exact[name])
                self._exact.append(_Target(slot, mine, (MASTER,), exact[name], value))
        return {target.entry.key: target.value for target in (*self._targets, *self._exact)}

    def _pieces(self) -> dict[int, Piece]:
        shards = self._engine.shards
        return {} if shards is None else {one.slot.index: one for one in shards.pieces}

    def _room(self, slot: Slot, piece: Piece | None, path: Path, entry: Entry) -> Any:
        """Memory for a value, of the type that ``load_state_dict()`` gives it; None for what is no tensor.

        Numbers that belong to a whole parameter keep the type that they were saved in. Raises ``ValueError`` as
        :meth:`_whole`.
        """
        if entry.shape is None or entry.dtype is None:
            return None
        like, region = slot.like, region_of(slot.param)
        dtype, device = entry.dtype, slot.rests_on
        counts = path[0] in SCALAR_STATE
        if counts:
            group = self._groups[slot.group]
            device = device if group.get("capturable") or group.get("fused") else torch.device("cpu")
        elif like.is_floating_point():
            dtype = like.dtype
        cut = piece is not None and not self._engine.sharded.whole
        if counts or entry.shape != region.shape or not (cut or region.divided):
            if region.divided and not counts and entry.shape.numel() != 1:
                raise ValueError(_misfit(self._names[id(slot.param)], str(path[0]), entry.shape, region.shape))
            return torch.empty(entry.shape, dtype=dtype, device=device)
        start, stop = (piece.start, piece.stop) if cut and piece is not None else (0, like.numel())
        return Chunked(like, start, torch.empty(stop - start, dtype=dtype, device=device), region)

    def take(self, read: Mapping[str, Any]) -> None:
        """What was `read` into the targets, by key, becomes the state, with those groups. On every rank."""
        states: dict[int, list[tuple[Path, Any]]] = {}
        for target in self._targets:
            states.setdefault(target.slot.index, []).append((target.path, self._value(target, read)))
        pieces = self._pieces()
        with self._full_state.share.updating():
            for slot in self._engine.slots:
                state = nest(states.get(slot.index, ()))
                self._optimizer.state.pop(slot.param, None)
                if slot.index in pieces:
                    set_state(self._engine.sharded, pieces[slot.index], state)
                elif state:
                    self._optimizer.state[slot.param] = state
            for group, saved in zip(self._optimizer.param_groups, self._groups, strict=True):
                group.update({key: value for key, value in saved.items() if key not in ("params", "param_names")})
            self._take_exact(read)

    def _take_exact(self, read: Mapping[str, Any]) -> None:
        if self._engine.strategy.gather_dtype is None or self._engine.shards is None:
            return
        later: dict[torch.Tensor, torch.Tensor] = {
            target.slot.param: self._value(target, read) for target in self._exact if target.piece is None
        }
        self._full_state.placement.load_masters(self._engine.shards, later)
        for target in self._exact:
            if target.piece is not None:
                put_master(target.piece, self._value(target, read))

    def _value(self, target: _Target, read: Mapping[str, Any]) -> Any:
        """What was read, as the state has it: of a piece that may end anywhere, one value after the other."""
        found = read[target.entry.key]
        if not isinstance(found, Chunked):
            return found
        flat = target.piece is not None and not self._engine.sharded.whole
        return found.held if flat else from_flat(found.held, target.slot.like)


def chunk_of(engine: Engine, slot: Slot) -> torch.Tensor:
    """This rank's share of a freed parameter, which may be nothing."""
    assert slot.bucket is not None
    for one in engine.sharded.pieces_of(slot.bucket):
        if one.slot is slot:
            return _chunk(one, one.elements)
    region = region_of(slot.param)
    if prod(region.shape) == 0:
        return torch.empty(region.shape, dtype=slot.like.dtype)
    return Chunked(slot.like, 0, slot.like.new_empty(0), region)


def _chunk(piece: Piece, values: torch.Tensor) -> torch.Tensor:
    """`values`, one for each element of the piece."""
    region = region_of(piece.slot.param)
    if prod(region.shape) == 0:  # without a chunk, the tensor would not be there
        return values.new_empty(region.shape)
    return Chunked(piece.slot.like, piece.start, values, region)


def _misfit(name: str, key: str, shape: Sequence[int], own: Sequence[int]) -> str:
    return (
        f"{name!r} is divided among ranks, and its state {key!r} has the shape {tuple(shape)}, not {tuple(own)}, so "
        "nobody knows what a rank has of it: take an optimizer that works element by element, such as AdamW"
    )
