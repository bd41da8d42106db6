"""Snapshots of values (numbers, small tensors, containers), to compare them later and to restore them.

Lists, dictionaries, sets, deques and plain objects are put back in place, as others may hold them, too. Everything else
(modules, optimizers, functions, large tensors) is compared, and not put back.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Frozen", "freeze", "same", "thaw"]

_MOST_ELEMENTS = 4096  # of a tensor that is copied
_MOST_VALUES = 1000  # that are looked at inside one value
_OPAQUE = (
    torch.nn.Module,
    torch.optim.Optimizer,
    type,
    types.ModuleType,
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
)


@dataclass(frozen=True, slots=True, eq=False)
class Frozen:
    """A snapshot: `value` itself, and its contents: a copy of a tensor, frozen values by key or position, or None."""

    value: Any
    inside: Any = None
    version: int | None = None  # of a tensor


def freeze(value: Any) -> Frozen:
    return _frozen(value, set(), iter(range(_MOST_VALUES)))


def _frozen(value: Any, seen: set[int], room: Iterator[int]) -> Frozen:
    if next(room, None) is None or id(value) in seen:
        return Frozen(value)
    if isinstance(value, torch.Tensor):
        copied = value.detach().clone() if value.numel() <= _MOST_ELEMENTS else None
        return Frozen(value, copied, None if value.is_inference() else value._version)
    if isinstance(value, list | tuple | deque):
        seen.add(id(value))
        return Frozen(value, [_frozen(item, seen, room) for item in value])
    if isinstance(value, set):
        return Frozen(value, set(value))
    content = _content(value)
    if content is None:
        return Frozen(value)
    seen.add(id(value))
    return Frozen(value, {key: _frozen(item, seen, room) for key, item in _kept(content)})


def _content(value: Any) -> dict[Any, Any] | None:
    """What a dictionary or a plain object holds."""
    if isinstance(value, dict):
        return value
    if isinstance(value, _OPAQUE):
        return None
    content = getattr(value, "__dict__", None)
    return content if isinstance(content, dict) else None


def _kept(content: dict[Any, Any]) -> list[tuple[Any, Any]]:
    """Without what is kept by parameter, which is the state of one parameter."""
    return [(key, item) for key, item in content.items() if not isinstance(key, torch.Tensor)]


def same(one: Frozen, other: Frozen) -> bool:
    """Whether both snapshots hold the same; a NaN is the same as a NaN."""
    mine, theirs = one.value, other.value
    if isinstance(mine, torch.Tensor):
        return isinstance(theirs, torch.Tensor) and _same_tensor(one, other)
    if one.inside is None or other.inside is None:
        return _equal(mine, theirs)
    if type(mine) is not type(theirs) or len(one.inside) != len(other.inside):
        return False
    if isinstance(one.inside, dict):
        return one.inside.keys() == other.inside.keys() and all(
            same(item, other.inside[key]) for key, item in one.inside.items()
        )
    if isinstance(one.inside, list):
        return all(map(same, one.inside, other.inside))
    return bool(one.inside == other.inside)


def _same_tensor(one: Frozen, other: Frozen) -> bool:
    if one.value is other.value and one.version is not None and one.version == other.version:
        return True
    mine, theirs = one.inside, other.inside
    if mine is None or theirs is None or mine.shape != theirs.shape or mine.dtype is not theirs.dtype:
        return False
    theirs = theirs.to(mine.device)
    return bool(((mine == theirs) | ((mine != mine) & (theirs != theirs))).all())


def _equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    try:
        return bool(one == other or (one != one and other != other))
    except Exception:  # of a comparison that somebody else has written
        return False


@torch.no_grad()
def thaw(frozen: Frozen) -> Any:
    """Restore the contents of the value, and return it."""
    value, inside = frozen.value, frozen.inside
    if inside is None:
        return value
    if isinstance(value, torch.Tensor):
        if value.is_inference() or value._version != frozen.version:
            value.copy_(inside)
    elif isinstance(value, list):
        value[:] = map(thaw, inside)
    elif isinstance(value, deque):
        items = list(map(thaw, inside))
        value.clear()
        value.extend(items)
    elif isinstance(value, tuple):
        for item in inside:
            thaw(item)
    elif isinstance(value, set):
        value.clear()
        value.update(inside)
    else:
        content = _content(value)
        assert content is not None, "what holds nothing has nothing inside"
        for key in [key for key, _ in _kept(content) if key not in inside]:
            del content[key]
        content.update((key, thaw(item)) for key, item in inside.items())
    return value
