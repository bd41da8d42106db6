"""``optimizer.state`` where updates are sharded: what is written to it reaches the pieces that this rank updates."""

from __future__ import annotations

from typing import Any

import torch

from overlap.core.shards import ShardUpdate
from overlap.state.held import begin_state, by_parameter, cuts, set_state

__all__ = ["LiveState", "replace_state", "state_of"]

_State = dict[str, Any]


class LiveState(dict[torch.Tensor, _State]):
    """State by parameter, the part this rank holds, as it is now: read, cleared, replaced like the optimizer's own.

    What is written for a parameter of which this rank holds nothing is forgotten: others update that one.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, shards: ShardUpdate) -> None:
        super().__init__(optimizer.state)
        for param, state in by_parameter(shards).items():
            super().__setitem__(param, state)
        self._whole: dict[torch.Tensor, _State] = optimizer.state
        self._shards = shards

    def __setitem__(self, param: torch.Tensor, state: _State) -> None:
        if not cuts(self._shards, param):
            self._whole[param] = state
        elif not set_state(self._shards, param, state):
            return
        super().__setitem__(param, state)

    def __missing__(self, param: torch.Tensor) -> _State:
        """As torch's own: empty, on every rank. Scripts ask whether there is something, to begin with it."""
        state: _State = {}
        if not cuts(self._shards, param):
            self._whole[param] = state
        elif not begin_state(self._shards, param, state):
            return state
        super().__setitem__(param, state)
        return state

    def __delitem__(self, param: torch.Tensor) -> None:
        super().__delitem__(param)
        self._whole.pop(param, None)
        set_state(self._shards, param, {})

    def pop(self, param: torch.Tensor, *default: Any) -> Any:
        if param not in self:
            if default:
                return default[0]
            raise KeyError(param)
        value = self[param]
        del self[param]
        return value

    def popitem(self) -> tuple[torch.Tensor, _State]:
        param = next(reversed(self))
        return param, self.pop(param)

    def clear(self) -> None:
        for param in list(self):
            del self[param]

    def setdefault(self, param: torch.Tensor, default: Any = None) -> Any:
        if param not in self:
            self[param] = {} if default is None else default
        return self.get(param, default)

    def update(self, other: Any = (), /) -> None:  # type: ignore[override]  # keys are tensors, never keywords
        pairs: dict[torch.Tensor, _State] = dict(other)
        for param, state in pairs.items():
            self[param] = state


def state_of(optimizer: torch.optim.Optimizer, shards: ShardUpdate | None) -> Any:
    """What ``state`` is: the optimizer's own, where this rank updates whole parameters."""
    return optimizer.state if shards is None else LiveState(optimizer, shards)


def replace_state(optimizer: torch.optim.Optimizer, shards: ShardUpdate | None, state: Any) -> None:
    """Make `state` what counts from now on."""
    if shards is None:
        optimizer.state = state
    else:
        live = LiveState(optimizer, shards)
        live.clear()
        live.update(state)
