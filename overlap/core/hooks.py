"""Hooks on parameters: who is told when a gradient is there."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

import torch
from torch.utils.hooks import RemovableHandle

from overlap.core.bucket import Slot

__all__ = ["GradientHooks"]

Owner = TypeVar("Owner")


class GradientHooks(Generic[Owner]):
    """One hook for each parameter, which calls `ready(owner, index, param)` as long as `owner` lives.

    What a parameter holds does not hold the owner: the garbage collector cannot see through a parameter's hooks.
    """

    def __init__(self, owner: Owner, ready: Callable[[Owner, int, torch.Tensor], None]) -> None:
        self._owner, self._ready = weakref.ref(owner), ready
        self._handles: dict[int, RemovableHandle] = {}

    def attach(self, slots: Iterable[Slot]) -> None:
        """Hook those of `slots` that have no hook yet and can have gradients."""
        for slot in slots:
            if slot.index not in self._handles and slot.param.requires_grad:
                self._handles[slot.index] = slot.param.register_post_accumulate_grad_hook(self._hook(slot.index))

    def remove(self) -> None:
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        reference, ready = self._owner, self._ready

        def hook(param: torch.Tensor) -> None:
            owner = reference()
            if owner is not None:
                ready(owner, index, param)

        return hook
