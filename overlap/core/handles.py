"""Finds tensors that a script keeps over a parameter's memory, such as ``w = layer.weight.data``.

No gate stands before such a tensor. torch counts how many tensors use a piece of memory, so that somebody has one shows:
``step()`` then waits until the values are there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

__all__ = ["Watch", "outlives", "shared", "use_count", "watch"]

#: Of memory, by the address of its storage: how many tensors and storages of Python's refer to it. torch promises nobody
#: that it stays; then nobody is seen to.
use_count: Callable[[int], int] = getattr(torch._C, "_storage_Use_Count", lambda _address: 0)


class Watch(NamedTuple):
    """A piece of memory, and the number of its users while only we use it."""

    memory: torch.UntypedStorage
    ours: int


def watch(tensor: torch.Tensor, before: Watch | None = None) -> Watch:
    """Count the users of `tensor`'s memory, now, when nobody else can have it; or go on from a watch `before`."""
    memory = tensor.untyped_storage()
    now = use_count(memory._cdata)
    return Watch(memory, now if before is None else min(now, before.ours))


def outlives(watched: Watch) -> bool:
    """Whether somebody still uses the memory, which we have given up."""
    return use_count(watched.memory._cdata) > 1


def shared(parameter: torch.Tensor) -> bool:
    """Whether somebody has another tensor over the memory of `parameter`, which is no part of a buffer of ours."""
    return parameter.layout is torch.strided and use_count(parameter.untyped_storage()._cdata) > 2
