"""A call, a group of calls, and the tensors they are made with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Call", "Calls", "Group", "gradient", "ones", "ramp"]

Call = Callable[[Any, int, int], Any]  # (hvd, rank, size): the same lines under any library
Calls = Mapping[str, Call]


@dataclass(frozen=True)
class Group:
    """Calls that share a process, in order. A call must not need what an earlier one has left."""

    name: str
    calls: Calls
    sizes: tuple[int, ...] = (1, 2, 4)
    after_shutdown: bool = False


def ramp(count: int, start: float = 0.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """`start`, `start` + 1, …"""
    return (torch.arange(count) + start).to(dtype)


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(*shape, dtype=dtype)


def gradient(collective: Callable[[torch.Tensor], Any], rows: int, rank: int, columns: int = 0) -> torch.Tensor:
    """The gradient of `collective`'s input where each element of its results has a weight of its own, on each rank."""
    shape = (rows, columns) if columns else (rows,)
    x = ramp(rows * max(columns, 1), rank).view(shape).requires_grad_()
    results = collective(x)
    total = torch.zeros(())
    for result in results if isinstance(results, (list, tuple)) else [results]:
        if result.is_floating_point():
            total = total + (result * ramp(result.numel(), 1 + 3 * rank).view(result.shape)).sum()
    total.backward()
    assert x.grad is not None
    return x.grad
