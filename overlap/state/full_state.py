"""The optimizer's whole state, wherever its shards lie: collected for ``state_dict()``, cut up again when one is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from overlap.core.engine import Engine
from overlap.state.masters import MASTER, numbered, taken, unnumbered
from overlap.state.pieces import PieceState, assemble
from overlap.state.shard_state import ShardState, agrees, export

__all__ = ["FullState", "exporter"]


class FullState:
    """The state of the user's `optimizer` in torch's own format."""

    def __init__(self, engine: Engine, optimizer: torch.optim.Optimizer, placement: ShardState) -> None:
        self._engine, self._optimizer = engine, optimizer
        self._placement, self.share = placement, placement.share

    def collect(self) -> dict[str, Any]:
        """See :meth:`overlap.optimizer.distributed.DistributedOptimizer.state_dict`."""
        engine, optimizer = self._engine, self._optimizer
        if engine.shards is None:
            return optimizer.state_dict()
        full: dict[torch.Tensor, dict[str, Any]] = {}
        loaded = self.share.loaded
        if loaded is not None:  # [Note: who has loaded by when]
            if not agrees(engine.shards, loaded):
                raise RuntimeError(
                    "optimizer.state was changed after load_state_dict(), and what other ranks have changed in their parts "
                    "of it is not known before the next update: change the state dict before you load it, or call "
                    "state_dict() after the next step()"
                )
            full = {engine.slots[index].param: _cloned(state) for index, state in loaded.items()}
        elif not engine.learning:
            full = assemble(engine.slots, self.share.collect(), whole=engine.shards.whole)
        masters = {**self._placement.loaded, **taken(full)}
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
            optimizer.load_state_dict(state_dict)
            if engine.shards is not None and not engine.learning:
                self.share.loaded = self._keep(masters)
            for bucket in engine.order:
                if bucket.holds_parameters:
                    self._placement.cut(engine.sharded, bucket, optimizer.state)
            if rounding:
                self._placement.load_masters(engine.sharded, masters)

    def _keep(self, masters: Mapping[torch.Tensor, torch.Tensor]) -> dict[int, dict[str, Any]]:
        """Copies of what was loaded for sharded parameters, by slot, before the shards take their parts of it."""
        kept = {}
        for bucket in self._engine.order:
            for slot in bucket.slots if bucket.holds_parameters else ():
                state = _cloned(self._optimizer.state.get(slot.param, {}))
                if slot.param in masters:
                    state[MASTER] = masters[slot.param].detach().clone()
                if state:
                    kept[slot.index] = state
        return kept


def _cloned(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state.items()}


def exporter(engine: Engine) -> Callable[[], PieceState]:
    """Gives this rank's part of the state. It does not hold the optimizer, which others' questions would keep alive."""
    return partial(_export, engine)


def _export(engine: Engine) -> PieceState:
    return {} if engine.shards is None else export(engine.shards)
