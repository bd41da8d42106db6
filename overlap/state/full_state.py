"""Collects the optimizer's whole state for ``state_dict()``, and cuts up a state that is loaded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from overlap.core.engine import Engine
from overlap.state.masters import MASTER, numbered, taken, unnumbered
from overlap.state.pieces import PieceState, assemble
from overlap.state.rows import Rows, WholeState
from overlap.state.shard_state import ShardState, export
from overlap.state.share import Which
from overlap.state.whole_parameters import WholeParameters

__all__ = ["FullState", "exporter"]


class FullState:
    """The state of the user's `optimizer` in torch's own format."""

    def __init__(self, engine: Engine, optimizer: torch.optim.Optimizer, placement: ShardState, rows: Rows) -> None:
        self._engine, self._optimizer, self.rows = engine, optimizer, rows
        self.placement, self.share = placement, placement.share
        self.parameters = WholeParameters(engine, self.share)
        self._gate()

    def _gate(self) -> None:
        """Whoever looks at the optimizer's own state finds whole state there, too."""
        if self._engine.shards is not None:
            self._optimizer.state = WholeState(self._optimizer.state, self.rows)

    def remove(self) -> None:
        """Give the optimizer back a plain state of its own, and the model its own ways."""
        self.parameters.remove()
        if isinstance(self._optimizer.state, WholeState):
            self._optimizer.state = defaultdict(dict, self._optimizer.state)

    def collect(self) -> dict[str, Any]:
        """See :meth:`overlap.optimizer.distributed.DistributedOptimizer.state_dict`."""
        engine, optimizer = self._engine, self._optimizer
        if engine.shards is None:
            return optimizer.state_dict()
        full: dict[torch.Tensor, dict[str, Any]] = {}
        loaded = self.share.loaded
        if loaded is not None:  # [Note: who has loaded by when]
            full = {engine.slots[index].param: _cloned(state) for index, state in loaded.items()}
        elif not engine.learning:
            full = assemble(engine.slots, self.share.collect(), whole=engine.shards.whole)
        self.rows.over(full)
        masters = {**self.placement.loaded, **taken(full)}
        state = optimizer.state
        whole = dict(state)
        state.update(full)
        try:
            saved = optimizer.state_dict()
        finally:
            state.clear()
            state.update(whole)
        if engine.strategy.gather_dtype is not None:
            saved["master"] = numbered(optimizer, masters)
        return saved

    def load(self, state_dict: dict[str, Any]) -> None:
        """See :meth:`overlap.optimizer.distributed.DistributedOptimizer.load_state_dict`."""
        engine, optimizer = self._engine, self._optimizer
        rounding = engine.strategy.gather_dtype is not None
        masters = unnumbered(optimizer, state_dict.get("master", {})) if rounding else {}
        with self.share.loading():
            self.rows.forget()
            optimizer.load_state_dict(state_dict)
            self._gate()
            if engine.shards is not None and not engine.learning:
                self.share.loaded = self._keep(masters)
            for bucket in engine.order:
                if bucket.sharded:
                    self.placement.cut(engine.sharded, bucket, optimizer.state)
            if rounding:
                self.placement.load_masters(engine.sharded, masters)

    def _keep(self, masters: Mapping[torch.Tensor, torch.Tensor]) -> dict[int, dict[str, Any]]:
        """Copies of what was loaded for sharded parameters, by slot, before the shards take their parts of it."""
        kept = {}
        for bucket in self._engine.order:
            for slot in bucket.slots if bucket.sharded else ():
                state = _cloned(self._optimizer.state.get(slot.param, {}))
                if slot.param in masters:
                    state[MASTER] = masters[slot.param].detach().clone()
                if state:
                    kept[slot.index] = state
        return kept


def _cloned(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state.items()}


def exporter(engine: Engine) -> Callable[[Which], PieceState]:
    """A function that exports this rank's part of the state.

    It does not hold the optimizer, which others' questions would keep alive.
    """
    return partial(_export, engine)


def _export(engine: Engine, which: Which) -> PieceState:
    return {} if engine.shards is None else export(engine.shards, which)
