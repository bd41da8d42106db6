"""Activation checkpoints of micro-batches in a stage: backward computes again what forward has not kept."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.utils.checkpoint
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["MODES", "checkpointed", "is_checkpointing", "is_recomputing", "stop"]

#: Which micro-batches are checkpointed. The last one is the first in backward: what it has kept is used at once.
MODES = ("always", "except_last", "never")


class _Local(threading.local):
    checkpointing = False
    recomputing = False


_local = _Local()


def is_checkpointing() -> bool:
    """Whether this thread runs a forward pass that backward is going to compute again."""
    return _local.checkpointing


def is_recomputing() -> bool:
    """Whether this thread computes a forward pass again, for backward."""
    return _local.recomputing


def stop(mode: str, micro_batches: int) -> int:
    """The number of the micro-batch from which on none is checkpointed (pure)."""
    return {"always": micro_batches, "except_last": micro_batches - 1, "never": 0}[mode]


@contextmanager
def _during(name: str) -> Iterator[None]:
    before = getattr(_local, name)
    setattr(_local, name, True)
    try:
        yield
    finally:
        setattr(_local, name, before)


@contextmanager
def _again(module: torch.nn.Module) -> Iterator[None]:
    """A context of recomputation. Batch norms of `module` compute as before, and leave their statistics as they are."""
    buffers = [each._buffers for each in module.modules() if isinstance(each, _BatchNorm)]
    kept = [dict(each) for each in buffers]
    for each in buffers:
        each.update({name: None if value is None else value.clone() for name, value in each.items()})
    try:
        with _during("recomputing"):
            yield
    finally:
        for each, values in zip(buffers, kept, strict=True):
            each.update(values)


def checkpointed(module: torch.nn.Module, function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)``, whose activations are computed again in backward; `module` is what it runs.

    Random numbers are the same then, and statistics of batch norms count once.
    """

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return _during("checkpointing"), _again(module)

    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, context_fn=contexts)
