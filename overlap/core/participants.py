"""Which ranks contribute to the rounds of one optimizer."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from overlap.transport.communicator import Communicator

__all__ = ["Participants"]


class Participants:
    """All ranks of `comm`, whose ranks in the job are `ranks`; counts rounds, which are alike on all ranks.

    A round is one set of reductions, of a step or of a skipped one. In `overlap.features.join_rounds` some ranks may be out
    of data: it overrides what follows, where core says what it is about to do, and tells them.
    """

    def __init__(self, comm: Communicator, ranks: Sequence[int]) -> None:
        self._comm, self.ranks = comm, tuple(ranks)
        self.round = 0
        self.opened = False  # a reduction of this round is issued
        self.rank = self.ranks[comm.rank]  # this one's in the job

    # - A round

    def open(self) -> None:
        """At the first reduction of a round."""
        self.opened = True

    def start(self, call: str) -> None:
        """Before the round is closed in a `call` of the script's, and anything waits for other ranks."""
        if not self.opened:
            self.open()

    def again(self, call: str) -> None:
        """Before ranks agree once more in a round that is closed."""

    def ask(self, call: str) -> None:
        """Before ranks say what each of them knows, in a `call` of the script's."""

    def answered(self, *, repeated: bool = False) -> None:
        """Every rank has said what it knows; the call may be `repeated`."""

    def close(self) -> None:
        """The round is over on this rank (others may still wait for its reductions)."""
        self.round, self.opened = self.round + 1, False

    def end(self) -> None:
        """No round follows, on any rank."""

    away: Collection[int] = ()  # who is known to have joined; of them, some may contribute to this round

    # - Who is there. Certain, and the same on all ranks, once a reduction of the round is done

    def present(self, number: int) -> list[int]:
        """Ranks (of the communicator) that contribute to round `number`."""
        return list(range(self._comm.size))

    @property
    def absent(self) -> bool:
        """Whether some ranks do not contribute to this round."""
        return False

    @property
    def leader(self) -> int:
        """The first rank (of the communicator) that contributes to this round."""
        return self.present(self.round)[0]

    def factor(self, number: int) -> float:
        """What an average over all ranks in round `number` is multiplied by to be one over those that contributed."""
        return 1.0

    @property
    def following(self) -> bool:
        """Whether this rank contributes nothing, and does what the others say."""
        return False

    def cannot_join(self, text: str) -> RuntimeError:
        """The error to raise where a rank that would have to contribute does not."""
        return RuntimeError(text)

    # - What is done with a round, for those who follow it

    def announce(self, what: str, **details: Any) -> None:
        """Announce, in the round, how the averages are about to be used."""

    def passes(self, what: str, **details: Any) -> None:
        """A pass through the model begins, for which all ranks gather parameters."""

    def leave(self, **details: Any) -> None:
        """End the round in a step whose updates are left for later; waits for nothing."""

    def refuse(self, what: str) -> None:
        """Raise, here and on the ranks that do not contribute, if any are known."""

    def call_together(self, what: str) -> None:
        """Call all ranks together, before something that waits for all of them."""

    def refuse_together(self, what: str) -> None:
        """Raise as :meth:`refuse` does, on every rank, once all have come to `what`."""
