"""The end of a job in which rounds may be on their way: every rank waits for them, and nobody for a round nobody sends."""

from __future__ import annotations

import weakref

from co2.rounds import Rounds
from overlap.communicator import Communicator
from overlap.objects import allgather_object

__all__ = ["Departure"]


class Departure:
    """A service of the session. It knows the rounds of all optimizers by topic, of those too that a script has dropped."""

    def __init__(self, control: Communicator) -> None:
        self._control = control
        self._rounds: weakref.WeakValueDictionary[str, Rounds] = weakref.WeakValueDictionary()

    def add(self, topic: str, rounds: Rounds) -> None:
        self._rounds[topic] = rounds

    def close(self) -> None:
        """On every rank."""
        mine = dict(self._rounds.items())
        seen = {topic: (rounds.events, rounds.rested) for topic, rounds in mine.items()}
        everybodys = allgather_object(self._control, seen)
        for topic in sorted(mine):
            events, rested = max((each[topic] for each in everybodys if topic in each), key=lambda last: last[0])
            mine[topic].finish(events, rested)
