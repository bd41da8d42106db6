"""Hooks on parameters: who is told when a gradient is there."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch
from torch.utils.hooks import RemovableHandle

from overlap.bucket import Slot

__all__ = ["GradientHooks"]


class GradientHooks:
    """One hook for each parameter, which calls the method `ready(index, param)` as long as its object lives.

    What a parameter holds does not hold that object: the garbage collector cannot see through a parameter's hooks.
    """

    def __init__(self, ready: Callable[[int, torch.Tensor], None]) -> None:
        self._ready = weakref.WeakMethod(ready)
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
        reference = self._ready

        def hook(param: torch.Tensor) -> None:
            ready = reference()
            if ready is not None:
                ready(index, param)

        return hook
