"""The whole state of sharded parameters, copied for scripts between two updates, and taken over by the next one.

    state[p] is read │ this rank asks all for their parts of it (`share`) and keeps what it gave out
    it is written to │ every rank writes to its own copy, as scripts do
    the next update  │ begins with it: each rank cuts its pieces from its copy, and forgets that

So no rank sees what another one, which is ahead, has written since the last update: [Note: nobody overtakes a step].
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from overlap.core.bucket import Slot
from overlap.core.buckets.planner import Planner
from overlap.core.feature import Policy
from overlap.state.held import set_state
from overlap.state.masters import MASTER
from overlap.state.pieces import assemble, part_of
from overlap.state.share import OUTLINE, StateShare

__all__ = ["Row", "Rows", "WholeState"]


class Row(dict[str, Any]):
    """The whole state of one parameter, kept up to date also where a script has held it for some steps."""

    def __init__(self, state: dict[str, Any], again: Callable[[Row], dict[str, Any]]) -> None:
        super().__init__(state)
        self._again, self.stale = again, False

    def refresh(self) -> None:
        if self.stale:
            self.stale = False
            fresh = self._again(self)
            super().clear()
            super().update(fresh)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(self.items()),)


def _fresh(name: str) -> Callable[..., Any]:
    plain = getattr(dict, name)

    def method(self: Row, *args: Any, **kwargs: Any) -> Any:
        self.refresh()
        return plain(self, *args, **kwargs)

    return method


for _name in (
    *(
        "__getitem__",
        "__setitem__",
        "__delitem__",
        "__contains__",
        "__iter__",
        "__len__",
        "__eq__",
        "__ne__",
        "__repr__",
    ),
    *("get", "items", "keys", "values", "pop", "popitem", "setdefault", "update", "clear", "copy", "__or__", "__ior__"),
):
    setattr(Row, _name, _fresh(_name))


class WholeState(defaultdict[torch.Tensor, dict[str, Any]]):
    """The part of the user's optimizer's state that every rank holds whole. What is sharded is looked up in `rows`."""

    def __init__(self, state: dict[torch.Tensor, dict[str, Any]], rows: Rows) -> None:
        super().__init__(dict, state)
        self._rows = rows

    def __missing__(self, param: torch.Tensor) -> dict[str, Any]:
        if self._rows.cut(param) is None:
            return super().__missing__(param)
        return self._rows.begun(param)

    def __reduce__(self) -> Any:
        return defaultdict, (dict,), None, None, iter(self.items())


class Rows:
    """The whole state of each sharded parameter that was read since the last update; `share` collects it."""

    def __init__(self, share: StateShare) -> None:
        self._share, self._known = share, 0
        self._slots: dict[int, Slot] = {}
        self._planner: Callable[[], Planner | None] = lambda: None
        self._policy: Callable[[], Policy | None] = lambda: None
        share.flush = self.flush

    def bind(self, planner: Planner, policy: Policy) -> None:
        """Serve the parameters of `planner`, which is not kept alive."""
        self._planner, self._policy = weakref.ref(planner), weakref.ref(policy)

    def cut(self, param: torch.Tensor) -> Slot | None:
        """The slot of `param` if its state is in pieces on all ranks; else None."""
        planner = self._planner()
        if planner is None or planner.shards is None:
            return None
        if self._known != len(planner.slots):
            self._slots, self._known = {id(slot.param): slot for slot in planner.slots}, len(planner.slots)
        slot = self._slots.get(id(param))
        return slot if slot is not None and slot.bucket is not None and slot.bucket.sharded else None

    def row(self, param: torch.Tensor) -> dict[str, Any] | None:
        """The whole state of `param`; None where there is none. On any rank, between updates."""
        copies = self._share.copies
        if param not in copies:
            found = self._fetched(param)
            copies[param] = None if found is None else Row(found, partial(self._again, param=param))
        return copies[param]

    def begun(self, param: torch.Tensor) -> dict[str, Any]:
        """The whole state of `param`, which begins as an empty dict where there is none, as torch's does."""
        found = self.row(param)
        return self.put(param, {}) if found is None else found

    def put(self, param: torch.Tensor, state: dict[str, Any] | None) -> dict[str, Any]:
        """Replace the state of `param` on this rank; every rank is to do so."""
        self._refuse()
        row = None if state is None else Row(state, partial(self._again, param=param))
        self._share.copies[param] = row
        return {} if row is None else row

    def known(self) -> list[torch.Tensor]:
        """All sharded parameters that have state."""
        planner, loaded = self._planner(), self._share.loaded
        if planner is None or planner.shards is None:
            return []
        have = set(loaded or ())
        if loaded is None:
            self._refuse()
            have.update(*self._share.collect(OUTLINE))
        copies = self._share.copies
        cut = [slot for slot in planner.slots if self.cut(slot.param) is not None]
        return [s.param for s in cut if (copies[s.param] is not None if s.param in copies else s.index in have)]

    def forget(self) -> None:
        """Forget all copies, since the state was replaced."""
        for row in self._share.copies.values():
            if isinstance(row, Row):
                row.stale = True
        self._share.copies.clear()

    def over(self, full: dict[torch.Tensor, dict[str, Any]]) -> None:
        """Put what scripts have read and written into the state `full`; exact values stay."""
        for param, row in self._share.copies.items():
            exact = {key: value for key, value in full.pop(param, {}).items() if key == MASTER}
            if row or exact:
                full[param] = {**(row or {}), **exact}

    def flush(self) -> None:
        """Before an update, give the pieces what scripts have written. They may not look at them meanwhile."""
        planner, copies = self._planner(), self._share.copies
        if planner is not None and planner.shards is not None:
            shards = planner.shards
            pieces = {id(one.slot.param): one for one in shards.pieces}
            for param, row in copies.items():
                one = pieces.get(id(param))
                if one is not None:
                    set_state(shards, one, part_of(row or {}, one.slot.like, one.start, one.stop, whole=shards.whole))
        self.forget()

    def _again(self, row: Row, param: torch.Tensor) -> dict[str, Any]:
        """What `row`, which a script has kept since an earlier step, holds now: it is what is given out from now on."""
        copies = self._share.copies
        if param not in copies:
            found = self._fetched(param)
            copies[param] = row
            return found or {}
        return copies[param] or {}

    def _fetched(self, param: torch.Tensor) -> dict[str, Any] | None:
        slot, loaded = self.cut(param), self._share.loaded
        assert slot is not None, "state of other parameters is whole on this rank"
        planner = self._planner()
        assert planner is not None
        assert planner.shards is not None
        if loaded is not None:
            found = loaded.get(slot.index, {})
            state = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in found.items()}
        else:
            self._refuse()
            parts = self._share.collect(slot.index)
            state = assemble(planner.slots, parts, whole=planner.shards.whole).get(param, {})
        state.pop(MASTER, None)
        return state or None

    def _refuse(self) -> None:
        policy = self._policy()
        if policy is not None:
            policy.refuse("optimizer.state")
