"""How long rounds have their parameters: until another optimizer takes them, or all ranks have dropped this one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from co2.departure import finish_together
from co2.rounds import Rounds
from overlap.transport.communicator import Communicator

__all__ = ["Tenure"]


class Tenure:
    """The hold of `rounds` on their parameters; see :class:`overlap.job.registry.Owner`, which this is."""

    def __init__(self, rounds: Rounds, control: Communicator) -> None:
        self._rounds, self._control = rounds, control

    @property
    def unfinished(self) -> bool:
        """Rounds are complete as soon as every rank has sent them."""
        return False

    def has(self, parameters: Sequence[torch.Tensor]) -> bool:
        return self._rounds.has(parameters)

    def hand_over(self, unfinished: bool) -> None:
        """What is on its way arrives, also from ranks that are a round behind, and is dropped."""
        finish_together(self._control, {"": self._rounds})
        self._rounds.retire()

    def retire(self) -> None:
        self._rounds.retire()
