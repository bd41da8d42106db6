"""The participants of rounds in which some ranks may have joined: who contributes, and what the others are told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from overlap.core.bucket import Slot
from overlap.core.participants import Participants
from overlap.features.join import CannotJoin, JoinedRanks, Word
from overlap.transport.communicator import Communicator

__all__ = ["JoinRounds"]

_CALLS = ("forward", "backward", "start", "again", "ask", "meeting")
_LAST = ("step", "infinite", "closure", "fold")


class JoinRounds(Participants):
    """Participants of whom some may have joined; counts the words about each round, too.

    Joined ranks count alike: they run the same code.

    With `shared_order`, reductions may have to wait for those of another optimizer.
    """

    def __init__(
        self,
        comm: Communicator,
        ranks: Sequence[int],
        joined_ranks: JoinedRanks,
        slots: list[Slot],
        *,
        shared_order: bool,
    ) -> None:
        super().__init__(comm, ranks)
        self._joined_ranks, self._slots, self.shared_order = joined_ranks, slots, shared_order
        self.away = joined_ranks.away
        self.topic = ""  # what the optimizer is called between ranks
        self._number = 0  # of the next word
        self._started = self._said_last = self._over = False

    def enroll(self, topic: str) -> None:
        """Begin to take part, as the optimizer is registered."""
        self.topic = topic

    def _trainable(self) -> list[int]:
        return [slot.index for slot in self._slots if slot.param.requires_grad]

    @property
    def place(self) -> tuple[int, int]:
        """The number of the round, and of the next word about it."""
        return self.round, self._number

    def _say(self, what: str, keep: bool, **details: Any) -> None:
        if self._over:
            return
        number, self._number = self._number, self._number + 1
        self._joined_ranks.say(Word(self.topic, self.round, number, what, details), self.ranks, keep=keep)

    # - A round

    def open(self) -> None:
        """At the first reduction of a round: where several optimizers share one order, joined ranks take part at once.

        Whoever waits for one optimizer's reductions may otherwise wait for another's, whose round has not started.
        """
        self._joined_ranks.check()
        if self.shared_order and not self.opened:
            self._say("open", keep=True, trainable=self._trainable())
        self.opened = True

    def start(self, call: str) -> None:
        """Before the round is closed in a `call` of the script's, and anything waits for joined ranks: they are called."""
        if not self._started:
            self.open()
            self._started = True
            self._say("start", keep=True, call=call, trainable=self._trainable())

    def again(self, call: str) -> None:
        """Before ranks agree once more in a round that is closed: joined ranks are called, too."""
        self._joined_ranks.check()
        self._say("again", keep=True, call=call)

    def ask(self, call: str) -> None:
        """Before ranks say what each of them knows, in a `call` of the script's: joined ranks are called, too."""
        self._joined_ranks.check()
        self._say("ask", keep=True, call=call)

    def answered(self, *, repeated: bool = False) -> None:
        """Every rank has said what it knows, joined ones too: nobody has to catch up with the call; it may be repeated."""
        self._joined_ranks.let_go(self.topic, _CALLS)
        self._started = self._started and not repeated

    def close(self) -> None:
        """The round is over on this rank (others may still wait for its reductions)."""
        self.round, self._number = self.round + 1, 0
        self.opened = self._started = self._said_last = False
        self._joined_ranks.closed(self.topic, self.round)

    def end(self) -> None:
        """No round follows, on any rank. Whoever joins later does not need this optimizer."""
        self._over = True
        self._joined_ranks.unsay(self.topic)

    # - Who is there. Certain, and the same on all ranks, once a reduction of the round is done

    def present(self, number: int) -> list[int]:
        """Ranks (of the communicator) that contribute to round `number`."""
        since = self._joined_ranks.joined(self.topic)
        return [index for index, rank in enumerate(self.ranks) if since.get(rank, number + 1) > number]

    @property
    def absent(self) -> bool:
        """Whether some ranks do not contribute to this round."""
        return len(self.present(self.round)) < self._comm.size

    @property
    def leader(self) -> int:
        """The first rank (of the communicator) that contributes to this round."""
        return self.present(self.round)[0]

    def factor(self, number: int) -> float:
        """What an average over all ranks in round `number` is multiplied by to be one over those that contributed.

        Raises :class:`CannotJoin` where a rank has joined that could not.
        """
        present = len(self.present(number))
        if present == self._comm.size:
            return 1.0
        for rank, obstacle in sorted(self._joined_ranks.obstacles(self.topic).items()):
            raise self.cannot_join(f"rank {rank} has called join(), but {obstacle}")
        return self._comm.size / max(present, 1)

    @property
    def following(self) -> bool:
        """Whether this rank has joined, and does what the others say."""
        return self._joined_ranks.following

    def cannot_join(self, text: str) -> CannotJoin:
        """The error to raise where ranks have joined that cannot."""
        return self._joined_ranks.cannot_join(text)

    @property
    def hindered(self) -> bool:
        """Whether this rank has joined and could not."""
        return self.ranks[self._comm.rank] in self._joined_ranks.obstacles(self.topic)

    # - Words

    def announce(self, what: str, **details: Any) -> None:
        """Tell joined ranks what comes, if there are any; where that is certain. The end of a round is told once."""
        if self.absent and not self._said_last:
            self._said_last = what in _LAST
            self._say(what, keep=False, **details)

    def passes(self, what: str, **details: Any) -> None:
        """Tell ranks that have joined, or will have joined in this round, that a pass begins, which needs their shares."""
        self._say(what, keep=True, **details)

    def leave(self, **details: Any) -> None:
        """Tell ranks that have joined, or will have joined in this round, that it ends in a step; wait for nothing."""
        self._said_last = True
        self._say("step", keep=True, **details)

    def refuse(self, what: str) -> None:
        """Raise :class:`CannotJoin` if ranks are known to have joined, there too."""
        joined = sorted(set(self._joined_ranks.joined(self.topic)).intersection(self.ranks))
        if joined and not self._joined_ranks.following:
            text = f"{what} needs every rank, and ranks {joined} have joined; call it after join()"
            self._say("refused", keep=False, text=text)
            raise self.cannot_join(text)

    def call_together(self, what: str) -> None:
        """Call ranks that have joined, before something that waits for all ranks; they raise as all do."""
        self._say("meeting", keep=True, text=what)

    def refuse_together(self, what: str) -> None:
        """Raise as :meth:`refuse` does, on every rank, once all have come to `what`."""
        joined = sorted(set(self._joined_ranks.joined(self.topic)).intersection(self.ranks))
        if joined:
            raise self.cannot_join(f"{what} needs every rank, and ranks {joined} have joined; call it after join()")
