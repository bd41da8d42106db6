"""Reports which rows of a weight a forward pass looks up and shortens, as ``nn.Embedding(max_norm=…)`` does.

torch has one function for that, whichever module or script looks rows up, with indices of its own. It is replaced by one
that tells who listens, and does the same.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch.nn import functional

__all__ = ["Listens", "listen"]

_NAME = "_no_grad_embedding_renorm_"


class Listens(Protocol):
    """An object that is told of every lookup in this process, before its rows are shortened."""

    def looked_up(self, weight: torch.Tensor, rows: torch.Tensor, max_norm: float, norm_type: float, /) -> None: ...


_listeners: weakref.WeakSet[Any] = weakref.WeakSet()


def listen(listener: Listens) -> None:
    """Tell `listener` of lookups, as long as it lives. A torch without the function tells nothing."""
    _listeners.add(listener)
    original = getattr(functional, _NAME, None)
    if original is not None and original is not _renorm:
        setattr(functional, _NAME, _renorm)


def _tell(weight: torch.Tensor, rows: torch.Tensor, max_norm: float, norm_type: float) -> None:
    for listener in list(_listeners):
        listener.looked_up(weight, rows, max_norm, norm_type)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _untraced(weight: torch.Tensor, rows: torch.Tensor, max_norm: float, norm_type: float) -> None:
    """Compiled code would tell once, when it is traced."""
    _tell(weight, rows, max_norm, norm_type)


def _renorm(weight: torch.Tensor, input: torch.Tensor, max_norm: float, norm_type: float) -> None:
    """What torch does. TorchScript compiles it as well, without the telling."""
    if not torch.jit.is_scripting():  # type: ignore[attr-defined]
        _untraced(weight, input, max_norm, norm_type)
    torch.embedding_renorm_(weight.detach(), input, max_norm, norm_type)
