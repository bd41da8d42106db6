"""Exact values of parameters that are used rounded, as a state dict has them: under "master", by number."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch

__all__ = ["MASTER", "numbered", "taken", "unnumbered"]


MASTER = "dear::master"  # beside the optimizer's own state, where that is taken apart and put together


def taken(full: MutableMapping[torch.Tensor, dict[str, Any]]) -> dict[torch.Tensor, torch.Tensor]:
    """Take the exact values out of a full state; those that are not known are left out, and the parameter counts."""
    masters = {param: state.pop(MASTER) for param, state in full.items() if MASTER in state}
    for param in [param for param, state in full.items() if not state]:
        del full[param]
    return {param: value for param, value in masters.items() if not bool(torch.isnan(value).any())}


def numbered(optimizer: torch.optim.Optimizer, masters: Mapping[torch.Tensor, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Exact values by the number that torch gives to each parameter in a state dict."""
    return {number: masters[param] for number, param in _numbers(optimizer).items() if param in masters}


def unnumbered(optimizer: torch.optim.Optimizer, saved: Mapping[int, torch.Tensor]) -> dict[torch.Tensor, torch.Tensor]:
    """Exact values by parameter, from those by number. Raises ``ValueError`` where a shape is not the parameter's."""
    masters = {}
    for number, param in _numbers(optimizer).items():
        if number not in saved:
            continue
        if saved[number].shape != param.shape:
            raise ValueError(
                f"the master of parameter {number} has shape {tuple(saved[number].shape)} in the state dict, and the "
                f"parameter has {tuple(param.shape)}: load the state of this model, with parameters in the same order"
            )
        masters[param] = saved[number]
    return masters


def _numbers(optimizer: torch.optim.Optimizer) -> dict[int, torch.Tensor]:
    found: dict[int, torch.Tensor] = {}
    seen: set[int] = set()
    for number, param in enumerate(param for group in optimizer.param_groups for param in group["params"]):
        if id(param) not in seen:
            seen.add(id(param))
            found[number] = param
    return found
