"""Splits large linear layers along their outputs: OSDP's operator splitting (Jiang et al., IJCAI 2023).

    whole   y = x W'               all of W is whole while it is used
    4 slices   y = [x W1' … x W4'] each slice has a bucket of its own, is gathered before its use and freed after it

Each slice is a `torch.nn.Linear`, whose parameters are rows of the layer's. State dicts have the layer's names and shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

__all__ = ["SlicedLinear", "cut", "split", "splittable"]

_NAMES = ("weight", "bias")


class SlicedLinear(torch.nn.Module):
    """`linear` in so many `slices` along its outputs; the first ones have a row more where these do not divide.

    Input of shape (..., in_features), output of shape (..., out_features). It equals the layer's up to rounding: libraries
    may add up products in another order for other sizes. The layer's values, type and device are taken over.
    """

    def __init__(self, linear: torch.nn.Linear, slices: int) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.slices = torch.nn.ModuleList(_rows(linear, rows) for rows in cut(self.out_features, slices))
        self.train(linear.training)
        self.register_state_dict_post_hook(_joined)
        self.register_load_state_dict_pre_hook(_cut_up)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([part(x) for part in self.slices], -1)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, slices={len(self.slices)}"


def cut(rows: int, slices: int) -> Iterator[slice]:
    """So many slices of as many `rows`, up to one."""
    begin = 0
    for number in range(slices):
        end = begin + rows // slices + (number < rows % slices)
        yield slice(begin, end)
        begin = end


def split(model: torch.nn.Module, slices: Mapping[str, int]) -> None:
    """Split linear layers of `model` in place, by name, each into so many slices. On every rank.

    Before an optimizer is made: parameters are others afterwards. Raises ``ValueError`` for what is no
    :class:`torch.nn.Linear`, for one that shares its weight with another module or has hooks, and for less than 2 slices or
    more than it has outputs.
    """
    found = dict(splittable(model))
    for name, count in slices.items():
        if name not in found:
            why = (
                "is no torch.nn.Linear with a weight of its own"
                if name in dict(model.named_modules())
                else "is not there"
            )
            raise ValueError(f"slices[{name!r}]={count}: of {type(model).__name__}, {name!r} {why}")
        if isinstance(count, bool) or not 2 <= count <= found[name].out_features:
            raise ValueError(
                f"slices[{name!r}]={count} should be 2 or more, and at most the layer's {found[name].out_features} outputs"
            )
    for name, count in slices.items():
        around, _, own = name.rpartition(".")
        setattr(model.get_submodule(around), own, SlicedLinear(found[name], count))


def splittable(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Linear]]:
    """The linear layers that can be split, and their names: none that shares parameters, as a head tied to an embedding."""
    holders: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            holders[id(parameter)] = holders.get(id(parameter), 0) + 1
    places: dict[torch.nn.Module, int] = {}
    for module in model.modules():
        for child in module.children():
            places[child] = places.get(child, 0) + 1
    for name, module in model.named_modules():
        if type(module) is torch.nn.Linear and name and places[module] == 1:
            alone = all(holders[id(parameter)] == 1 for parameter in module.parameters())
            if alone and not (module._forward_hooks or module._forward_pre_hooks or module._backward_hooks):
                yield name, module


def _rows(linear: torch.nn.Linear, rows: slice) -> torch.nn.Linear:
    with torch.device("meta"):
        part = torch.nn.Linear(linear.in_features, rows.stop - rows.start, bias=linear.bias is not None)
    for name, parameter in linear.named_parameters():
        values = parameter.detach()[rows].clone()
        setattr(part, name, torch.nn.Parameter(values, requires_grad=parameter.requires_grad))
    return part


def _joined(module: Any, found: dict[str, Any], prefix: str, _metadata: Any) -> None:
    for name in _NAMES:
        keys = [f"{prefix}slices.{number}.{name}" for number in range(len(module.slices))]
        if all(type(found.get(key)) in (torch.Tensor, torch.nn.Parameter) for key in keys):  # shares stay as they are
            found[prefix + name] = torch.cat([found.pop(key) for key in keys])


def _cut_up(module: Any, found: dict[str, Any], prefix: str, *_others: Any) -> None:
    for name in _NAMES:
        whole = found.get(prefix + name)
        if isinstance(whole, torch.Tensor) and len(whole) == module.out_features:
            del found[prefix + name]
            for number, rows in enumerate(cut(module.out_features, len(module.slices))):
                found[f"{prefix}slices.{number}.{name}"] = whole[rows]
