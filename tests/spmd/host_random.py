"""Random numbers of the host's generators for tensors of any device: tests seed those, and values are the CPU's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["HostRandom"]

_MAKE = {torch.rand, torch.randn, torch.randint, torch.randperm}
_MAKE_LIKE = {torch.rand_like, torch.randn_like, torch.randint_like}
_FILL = {getattr(torch.Tensor, name) for name in ("bernoulli_", "exponential_", "normal_", "random_", "uniform_")}


class HostRandom(TorchFunctionMode):
    """Draws on the host, and moves the numbers to `place` or where the call says.

    A ``torch.Generator`` is the host's unless it is told otherwise, and no device takes the generator of another one.
    """

    def __init__(self, place: torch.device) -> None:
        super().__init__()
        self._place = place

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        named = dict(kwargs or {})
        if func in _MAKE and "out" not in named:
            return _drawn(func, args, named, self._place)
        if func in _MAKE_LIKE:
            like, *rest = args
            return _drawn(func, [torch.empty_like(like, device="cpu"), *rest], named, like.device)
        if func in _FILL and args[0].device.type != "cpu":
            there, *rest = args
            drawn = func(torch.empty_like(there, device="cpu", requires_grad=False), *rest, **named)
            with torch.no_grad():
                return there.copy_(drawn)
        return func(*args, **named)


def _drawn(func: Callable[..., torch.Tensor], args: Sequence[Any], named: dict[str, Any], place: Any) -> torch.Tensor:
    place, wanted = named.pop("device", None) or place, named.pop("requires_grad", False)
    return func(*args, device="cpu", **named).to(place).requires_grad_(wanted)
