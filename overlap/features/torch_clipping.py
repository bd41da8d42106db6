"""torch.nn.utils.clip_grad_norm_ and clip_grad_value_, unmodified, over gradients that are still local.

Frameworks call them between backward and ``step()``, and nobody there can call ``synchronize()`` first. So they ask here
what their parameters are, wherever a script has them from: each of torch's functions runs what a cell of its closure holds,
and the cell is given a function that looks first. Parameters of no distributed optimizer are clipped as ever.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch.nn.utils import clip_grad

from overlap.job.session import current, is_initialized

__all__ = ["install"]

_Function = Callable[..., Any]


class _Distributed(Protocol):
    """What is asked of a distributed optimizer."""

    param_groups: list[dict[str, Any]]

    def _has_local_gradients(self, call: str) -> bool: ...
    def _clip(
        self, wanted: Callable[[torch.Tensor], bool], max_norm: float, norm_type: float, error_if_nonfinite: bool
    ) -> torch.Tensor: ...
    def synchronize(self) -> None: ...


def install() -> None:
    """From now on, in this process. Calling it again changes nothing."""
    for name, act in (("clip_grad_norm_", _norm), ("clip_grad_value_", _value)):
        function = getattr(clip_grad, name)
        if getattr(function, "_dear", False):
            continue
        original = function.__wrapped__
        cell = next((cell for cell in function.__closure__ or () if cell.cell_contents is original), None)
        if cell is None:  # another torch: reached by its name only
            looking = functools.wraps(function)(functools.partial(act, function))
            setattr(clip_grad, name, looking)
            setattr(torch.nn.utils, name, looking)
            function = looking
        else:
            cell.cell_contents = functools.partial(act, original)
        function._dear = True


def _norm(
    original: _Function,
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *args: Any,
    **rest: Any,
) -> torch.Tensor:
    chosen = _listed(parameters)
    optimizers = _local(chosen, "clip_grad_norm_()")
    if len(optimizers) == 1 and _wanted(chosen) <= _held(optimizers[0]):  # averages are clipped where they lie
        wanted = _wanted(chosen)
        return optimizers[0]._clip(lambda param: id(param) in wanted, max_norm, norm_type, error_if_nonfinite)
    for optimizer in optimizers:
        optimizer.synchronize()
    norm: torch.Tensor = original(chosen, max_norm, norm_type, error_if_nonfinite, *args, **rest)
    return norm


def _value(original: _Function, parameters: torch.Tensor | Iterable[torch.Tensor], *args: Any, **rest: Any) -> None:
    chosen = _listed(parameters)
    for optimizer in _local(chosen, "clip_grad_value_()"):
        optimizer.synchronize()
    original(chosen, *args, **rest)


def _listed(parameters: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


def _local(chosen: list[torch.Tensor], call: str) -> list[_Distributed]:
    """The distributed optimizers of `chosen` parameters whose gradients, on any rank, are not averages yet."""
    if not is_initialized():
        return []
    mine: list[_Distributed] = current().registry.having(chosen)
    return [optimizer for optimizer in mine if optimizer._has_local_gradients(call)]


def _wanted(chosen: list[torch.Tensor]) -> set[int]:
    return {id(parameter) for parameter in chosen}


def _held(optimizer: _Distributed) -> set[int]:
    return {id(param) for group in optimizer.param_groups for param in list.__iter__(group["params"])}
