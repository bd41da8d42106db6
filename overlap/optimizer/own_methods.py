"""Refuses updates that go past ``DistributedOptimizer.step()``, by which each rank would train on its own gradients.

The user's optimizer still has a ``step()``, which a script calls that has not kept the wrapper; and its class may have
methods beside torch's that update parameters, too (``first_step()`` of SAM).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

__all__ = ["guarded", "refuse_direct_steps"]


def guarded(optimizer: torch.optim.Optimizer, name: str, local: Callable[[], bool]) -> Any:
    """Attribute `name` of `optimizer`; a method that torch lacks raises ``RuntimeError`` while gradients are `local`."""
    found = getattr(optimizer, name)
    bound = getattr(found, "__self__", None) is optimizer
    if not bound or name.startswith("_") or hasattr(torch.optim.Optimizer, name):
        return found

    @functools.wraps(found)
    def called(*args: Any, **kwargs: Any) -> Any:
        if local():
            raise RuntimeError(
                f"{type(optimizer).__name__}.{name}() was called with gradients that are this rank's own still: call "
                "optimizer.synchronize() after backward() and before it"
            )
        return found(*args, **kwargs)

    return called


def refuse_direct_steps(optimizer: torch.optim.Optimizer, local: Callable[[], bool]) -> RemovableHandle:
    """Make ``optimizer.step()``, called by others than its wrapper, raise ``RuntimeError`` if gradients are `local`."""
    inner = weakref.ref(optimizer)

    def check(stepping: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if stepping is inner() and local():  # the wrapper shares the hooks
            raise RuntimeError(
                f"step() of the {type(stepping).__name__} was called, whose gradients are this rank's own: a "
                "DistributedOptimizer wraps it, and its step() is the one to call"
            )

    return optimizer.register_step_pre_hook(check)
