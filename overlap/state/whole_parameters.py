"""``model.state_dict()`` and ``model.load_state_dict()`` where each rank keeps a share of the parameters.

state_dict()        on any rank: whole values, for which it asks the others, whose main threads go on meanwhile
load_state_dict()   on every rank: each takes its share
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from overlap.core.bucket import Slot
from overlap.core.buckets.freed import FreedBucket
from overlap.core.engine import Engine
from overlap.core.gates.gates import Ours
from overlap.state.dtensors import TakesDTensors, before_loading
from overlap.state.pieces import PARAMETER, assemble
from overlap.state.share import StateShare
from overlap.transport.memory import to_flat

__all__ = ["WholeParameters"]


class WholeParameters:
    """Hooks on the modules that have parameters of `engine`. `share` collects those that are freed."""

    def __init__(self, engine: Engine, share: StateShare) -> None:
        self._engine, self._share = weakref.ref(engine), share
        self._handles: list[RemovableHandle] = []
        self._named: dict[torch.nn.Module, dict[str, Slot]] = {}
        self._handed_out: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()  # by slot
        self._stand_in: Callable[[Engine, Slot], Any] | None = None
        self._met: set[int] = set()  # hooks of modules that have loaded since all ranks have met

    @contextmanager
    def replaced(self, stand_in: Callable[[Engine, Slot], Any]) -> Iterator[None]:
        """A context in which state dicts have, for parameters that are away, what `stand_in` gives. On any rank."""
        before, self._stand_in = self._stand_in, stand_in
        try:
            yield
        finally:
            self._stand_in = before

    @property
    def stands_in(self) -> bool:
        """Whether this is inside :meth:`replaced`."""
        return self._stand_in is not None

    def attach(self, modules: Iterable[torch.nn.Module], slots: Iterable[Slot]) -> None:
        """Set hooks on those `modules` that have parameters of `slots`, freed now or later. May be repeated."""
        by_parameter = {id(slot.param): slot for slot in slots}
        for module in modules:
            found = ((name, by_parameter.get(id(param))) for name, param in dict.items(module._parameters))
            mine = {name: slot for name, slot in found if slot is not None}
            if module not in self._named:
                self._handles.append(before_loading(module, TakesDTensors()))
            named = self._named.setdefault(module, {})
            if mine and not named:
                self._handles += [
                    module.register_state_dict_post_hook(_Saved(self._collect, named)),
                    before_loading(module, _Loading(self._meet, named)),
                    module.register_load_state_dict_post_hook(_Loaded(self._take, named)),
                ]
            named.update(mine)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._named.clear()

    def _collect(self, slots: list[Slot], found: dict[str, Any]) -> dict[int, Any]:
        """What a state dict has, by slot; of a parameter that several modules have, what is in `found` already."""
        engine = self._engine()
        assert engine is not None
        if self._stand_in is not None:
            return {slot.index: self._stand_in(engine, slot) for slot in slots}
        there = {id(value) for value in found.values()}
        values: dict[int, Any] = {slot.index: self._handed_out.get(slot.index) for slot in slots}
        missing = [slot for slot in slots if id(values[slot.index]) not in there]
        if missing:
            values.update(self.gathered(missing))
            self._handed_out.update({slot.index: values[slot.index] for slot in missing})
        return values

    def gathered(self, slots: list[Slot]) -> dict[int, torch.Tensor]:
        """Whole values, by slot. On any rank that asks."""
        engine = self._engine()
        assert engine is not None
        parts = self._share.collect(tuple(slot.index for slot in slots))
        full = assemble(engine.slots, parts, whole=False)
        return {slot.index: full[slot.param][PARAMETER] for slot in slots}

    def _meet(self, module: int) -> None:
        """Every rank loads, as what is gathered ahead is gathered anew.

        They meet where a load begins, which is the first one or comes to a `module` again: who asks for parameters between
        two loads is answered before the second one.
        """
        engine = self._engine()
        assert engine is not None
        if not engine.unsharder.stale or module in self._met:
            engine.closing.meet("model.load_state_dict()")
            engine.unsharder.values_change()
            self._met.clear()
        self._met.add(module)

    def _take(self, slot: Slot, values: torch.Tensor) -> None:
        engine = self._engine()
        assert engine is not None
        assert slot.bucket is not None
        with self._share.taking(slot.index):
            for one in engine.sharded.pieces_of(slot.bucket):
                if one.slot is slot:
                    one.elements.copy_(to_flat(values, slot.like)[one.start : one.stop])
            engine.sharded.wrote()


class _Saved(Ours):
    def __init__(self, collect: Callable[[list[Slot], dict[str, Any]], dict[int, Any]], named: dict[str, Slot]) -> None:
        self._collect, self._named = collect, named

    def __call__(self, _module: torch.nn.Module, found: dict[str, Any], prefix: str, _metadata: Any) -> None:
        wanted = {
            prefix + name: slot for name, slot in self._named.items() if prefix + name in found and _in_shards(slot)
        }
        if wanted:
            values = self._collect(list(wanted.values()), found)
            found.update({key: values[slot.index] for key, slot in wanted.items()})


class _Loading(Ours):
    def __init__(self, meet: Callable[[int], None], named: dict[str, Slot]) -> None:
        self._meet, self._named = meet, named

    def __call__(self, found: dict[str, Any], prefix: str, *_others: Any) -> None:
        given = [(slot, found.get(prefix + name)) for name, slot in self._named.items() if _in_shards(slot)]
        mine = [slot for slot, value in given if getattr(value, "shape", None) == slot.like.shape]
        if mine:
            self._meet(id(self))
        for slot in mine:
            slot.param.data = torch.empty_like(slot.like)


class _Loaded(Ours):
    def __init__(self, take: Callable[[Slot, torch.Tensor], None], named: dict[str, Slot]) -> None:
        self._take, self._named = take, named

    def __call__(self, _module: torch.nn.Module, _keys: Any) -> None:
        for slot in self._named.values():
            if slot.freed is not None and slot.param.data_ptr() not in slot.freed.places:
                self._take(slot, slot.param.data)
                slot.param.data = slot.freed.away


def _in_shards(slot: Slot) -> bool:
    """Whether each rank's share is what counts, also where a pass has left the parameter whole."""
    return slot.freed is not None and isinstance(slot.bucket, FreedBucket) and not slot.bucket.opened
