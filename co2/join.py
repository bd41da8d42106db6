"""What ``join()`` finds of a co2 optimizer: averages need every rank, and a rank out of data is told so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from overlap.features.join import CannotJoin, JoinedRanks, Word

__all__ = ["JoinRefusal"]


class JoinRefusal:
    """What `JoinedRanks` asks of an optimizer: after how many `events` a rank has joined. Its owner counts them here.

    All ranks may join together. Who goes on to an average without a rank that has joined raises, and so does that rank:
    at once, or, while others of its `group` make steps that need it, when they have come to that average, too.
    """

    def __init__(self, joined_ranks: JoinedRanks, topic: str, ranks: Sequence[int], group: Sequence[int]) -> None:
        self._joined_ranks = joined_ranks
        self.topic, self.ranks, self._group = topic, tuple(ranks), frozenset(group)
        self._refused = ""  # what other ranks said that have come to an average, where this one has not
        self.events = 0
        self.obstacle = ""  # there is nothing to be contributed before the next average
        self.hyper_parameters: list[dict[str, Any]] = []

    @property
    def place(self) -> tuple[int, int]:
        return self.events, 0

    def refuse_to_send(self, event: int) -> None:
        """As :meth:`refuse`, where all of this rank's group are sure to do it now, too.

        They average gradients, and so know alike of a rank of theirs; of others, when what they have sent does not arrive.
        """
        if len(self._group) == 1 or not self._group.isdisjoint(self._joined_ranks.joined(self.topic)):
            self.refuse(event)

    def refuse(self, event: int) -> None:
        """Raise :class:`CannotJoin`, there too, if ranks have joined without a part in event `event`."""
        joined = self._joined_ranks.joined(self.topic)
        missing = sorted(rank for rank, since in joined.items() if since <= event)
        if missing:
            text = (
                f"an average of parameters needs every rank, and ranks {missing} have joined: give every rank the same "
                "number of steps between averages"
            )
            for number in sorted(set(joined.values())):  # each of them follows the one at its own place
                self._joined_ranks.say(Word(self.topic, number, 0, "refused", {"text": text}), self.ranks, keep=False)
            self._refused = ""
            raise self._joined_ranks.cannot_join(text)

    def catch_up(self) -> None:
        """No round of gradients is this object's."""

    def take_over(self, groups: list[dict[str, Any]]) -> None:
        """Hyper-parameters belong to the ranks that average gradients."""

    def arrive(self) -> None:
        """A round on its way arrives by itself. All ranks are here, those too that were refused an average."""
        if self._refused:
            self._refused, text = "", self._refused
            raise CannotJoin(text)

    def follow(self, word: Word) -> None:
        text: str = word.details["text"]
        if not self._group.issubset(self._joined_ranks.joined(self.topic)):
            self._refused = text  # the others of the group wait for this rank's gradients until they are refused, too
            return
        raise CannotJoin(text)
