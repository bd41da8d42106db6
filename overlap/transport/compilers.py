"""Hides functions from ``torch.compile``."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

__all__ = ["outside_compilers"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


def outside_compilers(call: Callable[_P, _R]) -> Callable[_P, _R]:
    """`call`, hidden from compilers: a compiled model's graph ends before it, and goes on after.

    A compiler would trace messages with tensors that have no memory, and sizes that are no numbers. The compiler's module,
    which takes a second to import, is not asked for before somebody else has.
    """
    untraced: list[Callable[_P, _R]] = []

    @functools.wraps(call)
    def outside(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if "torch._dynamo" not in sys.modules:
            return call(*args, **kwargs)
        if not untraced:
            untraced.append(torch.compiler.disable(call))
        return untraced[0](*args, **kwargs)

    return outside
