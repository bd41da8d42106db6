"""Converts between the state of pieces, which lie on all ranks, and that of whole parameters, as torch keeps it."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from overlap.core.bucket import Slot
from overlap.state.elementwise import SCALAR_STATE
from overlap.transport.memory import from_flat, to_flat

__all__ = ["PARAMETER", "PieceState", "assemble", "beside", "is_sliced", "part_of", "to_cpu"]

PARAMETER = "parameter"  # the key of a piece's own values

# slot index -> (start, stop within the flattened parameter, state by key)
PieceState = dict[int, tuple[int, int, dict[str, Any]]]


def assemble(slots: list[Slot], parts: Iterable[PieceState], *, whole: bool) -> dict[torch.Tensor, dict[str, Any]]:
    """Full state, by parameter, from every rank's exported pieces, which are `whole` parameters or slices."""
    full: dict[torch.Tensor, dict[str, Any]] = {}
    flats: dict[tuple[int, str], torch.Tensor] = {}
    for part in parts:
        for index, (start, stop, state) in part.items():
            param, place = slots[index].like, slots[index].rests_on
            target = full.setdefault(slots[index].param, {})
            for key, value in state.items():
                if whole or not is_sliced(key, value, stop - start):
                    target.setdefault(key, _placed(value, place))
                    continue
                flat = flats.get((index, key))
                if flat is None:
                    flat = flats[index, key] = torch.zeros(param.numel(), dtype=value.dtype, device=place)
                    target[key] = from_flat(flat, param)
                flat[start:stop].copy_(value)
    return full


def is_sliced(key: str, value: Any, numel: int) -> bool:
    """Whether a piece of `numel` elements keeps, under `key`, one value for each of them."""
    return isinstance(value, torch.Tensor) and value.dim() == 1 and value.numel() == numel and key not in SCALAR_STATE


def part_of(state: Mapping[str, Any], param: torch.Tensor, start: int, stop: int, *, whole: bool) -> dict[str, Any]:
    """Copies of what a piece [start, stop) of `param`, or all of it where pieces are `whole`, has of its full `state`."""

    def part(key: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return copy.deepcopy(value)
        if whole:
            return value.clone()
        if key in SCALAR_STATE or value.shape != param.shape:
            return copy.deepcopy(value)
        return to_flat(value, param)[start:stop].clone()

    return {key: part(key, value) for key, value in state.items()}


def _placed(value: Any, place: torch.device) -> Any:
    """A copy where torch keeps it: numbers on the CPU, what has dimensions at the `place` of the parameter."""
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    return value.to(place if value.dim() else value.device, copy=True)


def beside(state: dict[str, Any], values: torch.Tensor) -> dict[str, Any]:
    """The `state` of a piece with these `values`, of which it has what has dimensions on their device."""
    strays = {
        key: value.to(values.device)
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and value.dim() and value.device != values.device
    }
    return {**state, **strays} if strays else state


def to_cpu(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
