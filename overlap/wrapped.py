"""The user's optimizer while it is wrapped: it stays in the script's hands, so what is done to it there is watched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from overlap.bucket import Slot
from overlap.listed import GroupGates
from overlap.own_methods import refuse_direct_steps
from overlap.roster import Roster
from overlap.transit import Transit

__all__ = ["Wrapped"]


class Wrapped:
    """Watches `optimizer`, whose parameters `slots` are; its groups hand them out when they have come through `transit`.

    Its own ``step()`` is refused while gradients are `local`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        slots: Sequence[Slot],
        transit: Transit | None,
        local: Callable[[], bool],
    ) -> None:
        self._roster = Roster(optimizer, slots)
        self._gates = None if transit is None else GroupGates(optimizer, transit)
        self._direct = refuse_direct_steps(optimizer, local)

    def follow(self, *, in_parts: bool) -> None:
        """In a step: see :meth:`overlap.roster.Roster.follow`."""
        self._roster.follow(in_parts=in_parts)

    def guard(self) -> None:
        """Also the groups that were added since."""
        if self._gates is not None:
            self._gates.guard()

    def unwatched(self) -> AbstractContextManager[None]:
        """Inside, this thread goes through the groups without looking at values."""
        return nullcontext() if self._gates is None else self._gates.open()

    def remove(self) -> None:
        """Leave the optimizer as it was."""
        self._direct.remove()
        if self._gates is not None:
            self._gates.remove()
