"""Ends rounds in step on all ranks: what some ranks have sent all send, and what no rank sends nobody waits for.

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
    """Have ranks that are a round behind send it, and wait until all rounds have arrived, by topic.

    On every rank of `control`.

    Those that are in the others' rounds still, out of data, are told that there are no more.
    """
    said = {topic: rounds.standing for topic, rounds in mine.items()}
    everybodys = allgather_object(control, said)
    for topic in sorted(mine):
        standings = [each[topic] for each in everybodys if topic in each]
        last = max(standings, key=lambda standing: standing.sent)
        mine[topic].finish(said[topic], last, any(standing.joined for standing in standings))


class Shutdown:
    """The session's service that ends all rounds in ``shutdown()``.

    It knows the rounds of all optimizers by topic, of those too that a script has dropped.
    """

    def __init__(self, control: Communicator) -> None:
        self._control = control
        self._rounds: weakref.WeakValueDictionary[str, Rounds] = weakref.WeakValueDictionary()

    def add(self, topic: str, rounds: Rounds) -> None:
        self._rounds[topic] = rounds

    def training(self, parameters: Sequence[torch.nn.Parameter]) -> Rounds | None:
        """The rounds that have one of `parameters`."""
        return next((rounds for rounds in self._rounds.values() if rounds.has(parameters)), None)

    def close(self) -> None:
        """Finish all rounds, on every rank."""
        finish_together(self._control, dict(self._rounds.items()))

    def interrupt(self) -> None:
        """Do nothing: nobody waits here."""

    def abandon(self) -> None:
        """Do nothing: rounds end with their optimizers."""


class Ownership:
    """The claim of `rounds` on their parameters, as an :class:`overlap.job.registry.Owner`."""

    def __init__(self, rounds: Rounds, control: Communicator) -> None:
        self._rounds, self._control = rounds, control

    @property
    def unfinished(self) -> bool:
        """False: rounds are complete as soon as every rank has sent them."""
        return False

    def has(self, parameters: Sequence[torch.Tensor]) -> bool:
        return self._rounds.has(parameters)

    channels = ()

    def meaning(self, label: str) -> str:
        """Nothing, since labels of rounds are words already."""
        return ""

    def hand_over(self, unfinished: bool) -> None:
        """Wait for what is in flight, also from ranks that are a round behind, and drop it."""
        finish_together(self._control, {"": self._rounds})
        self._rounds.retire()

    def retire(self) -> None:
        self._rounds.retire()
