"""Watches the user's optimizer while it is wrapped, since scripts go on changing its groups.

Which parameter belongs to which group of the user's optimizer, where a script edits ``param_groups`` while it trains.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from overlap.core.bucket import Slot
from overlap.core.engine import Engine
from overlap.core.gates.gates import GroupGates, listed
from overlap.core.round import Stage
from overlap.optimizer.own_methods import refuse_direct_steps

__all__ = ["Roster", "Wrapped"]


class Wrapped:
    """Watches `optimizer`, whose parameters are those of `engine`. With `gated`, its groups wait before they hand them out.

    Its own ``step()`` is refused while gradients are local.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, engine: Engine, *, gated: bool) -> None:
        self._engine = weakref.ref(engine)
        self._roster = Roster(optimizer, engine.slots)
        self._gates = GroupGates(optimizer, engine.transit) if gated else None
        self.stepping = False  # inside the wrapper's step(): an optimizer's own may call its base's, which runs hooks
        self._direct = refuse_direct_steps(optimizer, lambda: not self.stepping and self.local)

    @property
    def local(self) -> bool:
        """Whether gradients arrived since the last step that ``synchronize()`` has not averaged."""
        engine = self._engine()
        return engine is not None and engine.holds_gradients and engine.round.stage is not Stage.SYNCHRONIZED

    def follow(self, *, in_parts: bool) -> None:
        """Follow changes of the groups, in a step: see :meth:`overlap.optimizer.param_groups.Roster.follow`."""
        self._roster.follow(in_parts=in_parts)

    def guard(self) -> None:
        """Set gates, also on groups that were added since."""
        if self._gates is not None:
            self._gates.guard()

    def unwatched(self) -> AbstractContextManager[None]:
        """A context in which this thread goes through the groups without waiting, since it reads no values."""
        return nullcontext() if self._gates is None else self._gates.open()

    def remove(self) -> None:
        """Leave the optimizer as it was."""
        self._direct.remove()
        if self._gates is not None:
            self._gates.remove()


class Roster:
    """Compares `optimizer`'s groups with the slots that were made from them."""

    def __init__(self, optimizer: torch.optim.Optimizer, slots: Sequence[Slot]) -> None:
        self._optimizer, self._slots = optimizer, slots
        self._known = self._members()

    def _members(self) -> list[list[int]]:
        return [[id(param) for param in listed(group["params"])] for group in self._optimizer.param_groups]

    def follow(self, *, in_parts: bool) -> None:
        """In a step, notice parameters that were moved: they go by their new group from now on. Communicates nothing.

        Raises ``RuntimeError`` for a parameter that came into a group otherwise than by ``add_param_group()``, and for one
        that was taken out where it is updated `in_parts` by us, not by the optimizer that goes through its groups.
        """
        members = self._members()
        if members == self._known:
            return
        slots = {id(slot.param): slot for slot in self._slots}
        groups = {number: index for index, numbers in enumerate(members) for number in numbers}
        for group in self._optimizer.param_groups:
            for param in listed(group["params"]):
                if id(param) not in slots:
                    raise RuntimeError(
                        f"a parameter of shape {tuple(param.shape)} was put into param_groups, where it would be trained "
                        "by this rank's gradients alone: use the DistributedOptimizer's add_param_group(), or wrap the "
                        "optimizer again"
                    )
        gone = [slot for number, slot in slots.items() if number not in groups]
        if gone and in_parts:
            raise RuntimeError(
                f"parameter {gone[0].name!r} was taken out of param_groups: use requires_grad_(False) to stop its updates, "
                "or wrap the optimizer again"
            )
        for number, slot in slots.items():
            slot.group = groups.get(number, slot.group)
        self._known = members
