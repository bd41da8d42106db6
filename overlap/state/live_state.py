"""``optimizer.state`` where updates are sharded: by parameter, whole, read and written like the optimizer's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from overlap.core.shards import ShardUpdate
from overlap.state.held import by_parameter
from overlap.state.rows import Rows

__all__ = ["LiveState", "held_state", "replace_state", "state_of"]

_State = dict[str, Any]
_NOTHING = object()


class LiveState(dict[torch.Tensor, _State]):
    """The state as one process would have it; that of sharded parameters is a copy, which the next update uses.

    Every rank writes the same to it. Reading asks the other ranks, whatever they do meanwhile.
    """

    def __init__(self, whole: dict[torch.Tensor, _State], rows: Rows) -> None:
        super().__init__()
        self._whole, self._rows = whole, rows

    def _sharded(self, param: Any) -> bool:
        return isinstance(param, torch.Tensor) and self._rows.cut(param) is not None

    def __getitem__(self, param: torch.Tensor) -> _State:
        return self._whole[param]  # as torch's own, empty where there is none

    def __setitem__(self, param: torch.Tensor, state: _State) -> None:
        if self._sharded(param):
            self._rows.put(param, state)
        else:
            self._whole[param] = state

    def __delitem__(self, param: torch.Tensor) -> None:
        if param not in self:
            raise KeyError(param)
        if self._sharded(param):
            self._rows.put(param, None)
        else:
            del self._whole[param]

    def __contains__(self, param: object) -> bool:
        if self._sharded(param):
            return self._rows.row(param) is not None  # type: ignore[arg-type]
        return param in self._whole

    def _parameters(self) -> list[torch.Tensor]:
        return [*self._whole, *self._rows.known()]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._parameters())

    def __reversed__(self) -> Iterator[torch.Tensor]:
        return reversed(self._parameters())

    def __len__(self) -> int:
        return len(self._parameters())

    def _plain(self) -> dict[torch.Tensor, _State]:
        return {param: self[param] for param in self._parameters()}

    def keys(self) -> Any:
        return dict.fromkeys(self._parameters()).keys()

    def values(self) -> Any:
        return self._plain().values()

    def items(self) -> Any:
        return self._plain().items()

    def copy(self) -> dict[torch.Tensor, _State]:
        return self._plain()

    def __eq__(self, other: object) -> bool:
        return self._plain() == other

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._plain())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (self._plain(),)

    def get(self, param: torch.Tensor, default: Any = None) -> Any:
        return self[param] if param in self else default  # noqa: SIM401  this is what it would call

    def pop(self, param: torch.Tensor, default: Any = _NOTHING) -> Any:
        if param not in self:
            if default is _NOTHING:
                raise KeyError(param)
            return default
        value = self[param]
        del self[param]
        return value

    def popitem(self) -> tuple[torch.Tensor, _State]:
        param = next(reversed(self))
        return param, self.pop(param)

    def clear(self) -> None:
        for param in self._parameters():
            del self[param]

    def setdefault(self, param: torch.Tensor, default: Any = None) -> Any:
        if param not in self:
            self[param] = {} if default is None else default
        return self[param]

    def update(self, other: Any = (), /) -> None:  # type: ignore[override]  # keys are tensors, never keywords
        pairs: dict[torch.Tensor, _State] = dict(other)
        for param, state in pairs.items():
            self[param] = state


def state_of(optimizer: torch.optim.Optimizer, shards: ShardUpdate | None, rows: Rows) -> Any:
    """The value of ``optimizer.state``: the optimizer's own, where this rank updates whole parameters."""
    return optimizer.state if shards is None else LiveState(optimizer.state, rows)


def replace_state(optimizer: torch.optim.Optimizer, shards: ShardUpdate | None, rows: Rows, state: Any) -> None:
    """Replace the optimizer's state by `state`."""
    if shards is None:
        optimizer.state = state
    else:
        live = LiveState(optimizer.state, rows)
        pairs = dict(state)
        live.clear()
        live.update(pairs)


def held_state(optimizer: torch.optim.Optimizer, shards: ShardUpdate | None) -> dict[torch.Tensor, _State]:
    """The state that this rank holds: of sharded parameters its pieces, 1-D tensors unless they are whole."""
    return {**optimizer.state, **({} if shards is None else by_parameter(shards))}
