"""The end of rounds that may be on their way: every rank waits for them, and nobody for a round nobody sends.

How long rounds have their parameters: until another optimizer takes them, or all ranks have dropped this one.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence

import torch

from co2.rounds import Rounds
from overlap.transport.communicator import Communicator
from overlap.transport.objects import allgather_object

__all__ = ["Ownership", "Shutdown", "finish_together"]


def finish_together(control: Communicator, mine: Mapping[str, Rounds]) -> None:
    """Whoever is a round behind others sends it, and all have arrived, by topic. On every rank of `control`.

    Those that are in the others' rounds still, out of data, are told that there are no more.
    """
    said = {topic: rounds.standing for topic, rounds in mine.items()}
    everybodys = allgather_object(control, said)
    for topic in sorted(mine):
        standings = [each[topic] for each in everybodys if topic in each]
        last = max(standings, key=lambda standing: standing.sent)
        mine[topic].finish(said[topic], last, any(standing.joined for standing in standings))


class Shutdown:
    """A service of the session. It knows the rounds of all optimizers by topic, of those too that a script has dropped."""

    def __init__(self, control: Communicator) -> None:
        self._control = control
        self._rounds: weakref.WeakValueDictionary[str, Rounds] = weakref.WeakValueDictionary()

    def add(self, topic: str, rounds: Rounds) -> None:
        self._rounds[topic] = rounds

    def training(self, parameters: Sequence[torch.nn.Parameter]) -> Rounds | None:
        """Those that have one of `parameters`."""
        return next((rounds for rounds in self._rounds.values() if rounds.has(parameters)), None)

    def close(self) -> None:
        """On every rank."""
        finish_together(self._control, dict(self._rounds.items()))

    def interrupt(self) -> None:
        """Nobody waits here."""

    def abandon(self) -> None:
        """Rounds end with their optimizers."""


class Ownership:
    """The hold of `rounds` on their parameters; see :class:`overlap.job.registry.Owner`, which this is."""

    def __init__(self, rounds: Rounds, control: Communicator) -> None:
        self._rounds, self._control = rounds, control

    @property
    def unfinished(self) -> bool:
        """Rounds are complete as soon as every rank has sent them."""
        return False

    def has(self, parameters: Sequence[torch.Tensor]) -> bool:
        return self._rounds.has(parameters)

    channels = ()

    def meaning(self, label: str) -> str:
        """Labels of rounds are words."""
        return ""

    def hand_over(self, unfinished: bool) -> None:
        """What is on its way arrives, also from ranks that are a round behind, and is dropped."""
        finish_together(self._control, {"": self._rounds})
        self._rounds.retire()

    def retire(self) -> None:
        self._rounds.retire()
