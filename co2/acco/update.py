"""Applies the user's optimizer to this rank's shards, for good, or for an estimate that leaves no trace in its state.

As in `overlap.core.shards`, a shadow of it (same class, same attributes, other parameters) steps pieces of parameters. Here
they are copies, since the parameters themselves are in use, on the main thread, while the shadow steps on a round's.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from overlap.core.bucket import Slot
from overlap.core.once import named, unhooked_step, writable, written
from overlap.core.shards import shadow_of
from overlap.state.elementwise import is_per_parameter
from overlap.state.pieces import part_of

__all__ = ["OwnedPiece", "ShardSteps"]


@dataclass(slots=True, eq=False)
class OwnedPiece:
    """Elements [start, stop) of the flattened parameter of `slot`, with the optimizer's state for them."""

    slot: Slot
    start: int
    stop: int
    state: dict[str, Any]

    def copied_state(self) -> dict[str, Any]:
        return copy.deepcopy(self.state)


class ShardSteps:
    """Steps of `optimizer` on pieces, with the hyper-parameters that it had at the last :meth:`note`."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._shadow = shadow_of(optimizer)
        self._step = unhooked_step(optimizer)
        self._known = is_per_parameter(optimizer)
        self._groups: list[dict[str, Any]] = []

    def note(self) -> None:
        """Take the hyper-parameters as they are now for the next step. On the main thread, which alone changes them."""
        self._groups = [
            {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in group.items()}
            for group in ({**group, "params": None} for group in self._optimizer.param_groups)
        ]

    def whole_state(self, slot: Slot) -> dict[str, Any]:
        """Take a parameter's state out of the user's optimizer, as after loading one; pieces keep it from now on."""
        return self._optimizer.state.pop(slot.param, {})

    def give(self, slot: Slot, state: Mapping[str, Any]) -> None:
        """Give the user's optimizer its state for a parameter, in the types in which it was saved."""
        self._optimizer.state[slot.param] = dict(state)

    def piece(self, slot: Slot, start: int, stop: int, state: Mapping[str, Any]) -> OwnedPiece:
        """A piece of a parameter with its part of the whole `state`, in the host's memory."""
        part = part_of(state, slot.param, start, stop, whole=False)
        held = {key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in part.items()}
        return OwnedPiece(slot, start, stop, held)

    @torch.no_grad()
    def __call__(self, steps: Mapping[OwnedPiece, tuple[torch.Tensor, torch.Tensor]], *, forget: bool = False) -> None:
        """Update values in place, of each piece by its gradient: 1-D tensors. `forget`: the state stays as it was."""
        stepped: dict[OwnedPiece, torch.nn.Parameter] = {}
        by_group: dict[int, list[torch.nn.Parameter]] = {}
        self._shadow.state = defaultdict(dict)
        for one, (values, gradient) in steps.items():
            stepped[one] = proxy = torch.nn.Parameter(values)
            proxy.grad = gradient
            by_group.setdefault(one.slot.group, []).append(proxy)
            state = one.copied_state() if forget else one.state
            if state:
                self._shadow.state[proxy] = state
        if by_group:
            self._shadow.param_groups = [{**self._groups[i], "params": proxies} for i, proxies in by_group.items()]
            before = {} if self._known else writable(self._shadow)
            self._step(self._shadow)
            found = {} if self._known else written(before, writable(self._shadow))
            if found:
                raise RuntimeError(
                    f"{type(self._shadow).__name__}.step() wrote {named(next(iter(found)))}, and acco steps twice in a "
                    "round, once for an estimate that is forgotten: take another outer rule, or keep such values in the "
                    "state of parameters"
                )
        for one, proxy in stepped.items():
            if not forget:
                one.state = self._shadow.state.get(proxy, {})
        self._shadow.state = defaultdict(dict)
