"""Gives all ranks one rank's optimizer state, except for what cannot be sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from overlap.transport.broadcast import broadcast_described, uproot
from overlap.transport.communicator import Communicator
from overlap.transport.objects import is_picklable

__all__ = ["broadcast_optimizer_state"]

# Where in an optimizer a value is: "param_groups" and the number of the group, or "state" and that of the parameter.
_Place = tuple[str, Any]


def broadcast_optimizer_state(comm: Communicator, optimizer: torch.optim.Optimizer, root: int) -> None:
    """Give every rank the root's hyper-parameters and state, whatever it had before. On every rank of `comm`.

    Follows the root's structure; never takes an optimizer step to create state, which would change parameters. What the
    root cannot pickle, such as a function in a parameter group, stays what it is on each rank.
    """
    if not 0 <= root < comm.size:
        raise ValueError(f"root should be a rank from 0 to {comm.size - 1} and is {root}")
    if comm.size == 1:
        return
    state, left = broadcast_described(comm, lambda tensors: _described(optimizer, tensors), root)
    if comm.rank == root:
        return
    own = _values(optimizer) if left else {}
    kept = [(place, key, own[place][key]) for place, key in left if key in own.get(place, ())]
    optimizer.load_state_dict(state)  # which copies, and so could fail for what is kept
    loaded = _values(optimizer) if kept else {}
    for place, key, value in kept:
        loaded[place][key] = value


def _described(optimizer: torch.optim.Optimizer, tensors: list[torch.Tensor]) -> Any:
    """The state dict without what cannot be pickled, its tensors uprooted; and where what is left out is."""
    left: list[tuple[_Place, Any]] = []

    def sendable(place: _Place, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return uproot(values, tensors)
        described = {}
        for key, value in values.items():
            inside: list[torch.Tensor] = []
            item = uproot(value, inside)
            if is_picklable(item):
                described[key] = item
                tensors.extend(inside)
            else:
                left.append((place, key))
        return described

    def section(name: str, value: Any) -> Any:
        if name == "param_groups":
            return [sendable((name, index), group) for index, group in enumerate(value)]
        if name == "state":
            return {number: sendable((name, number), values) for number, values in value.items()}
        return uproot(value, tensors)

    return {name: section(name, value) for name, value in optimizer.state_dict().items()}, left


def _values(optimizer: torch.optim.Optimizer) -> dict[_Place, dict[str, Any]]:
    """The dictionaries that hold the optimizer's own values; parameters are numbered as in a state dict."""
    found: dict[_Place, dict[str, Any]] = {}
    parameters = [param for group in optimizer.param_groups for param in group["params"]]
    for number, param in enumerate(parameters):
        if param in optimizer.state:
            found["state", number] = optimizer.state[param]
    for index, group in enumerate(optimizer.param_groups):
        found["param_groups", index] = group
    return found
