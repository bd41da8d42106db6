"""``join()`` for co2: a rank that is out of data takes part in the others' averages, and contributes nothing.

Each event, a round or an average, begins with a small all-reduce, by which every rank learns how the others take part in it
(`co2.communication`). A rank that has joined comes to that first, on a thread of its own, and then does what a rank that
trains says about the event: it sends, owns its shards, and takes over what comes of it, as ever. What it has learned before
it was out of data counts once more, in the next event of these parameters; from then on averages are over those that are
left. When all have joined, they see it there, too: nothing is done, and whoever was inside a round goes on inside it.

A rank of a group (`nprocs_per_node`) makes the group's steps, which the others of it tell of (`overlap.features.join`), and
with them its rounds, as long as one of them trains: it has their parameters, and counts as they do.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection, Sequence
from typing import Any, Protocol

import torch

from overlap.features.join import CannotJoin, JoinedRanks, Word
from overlap.transport.communicator import Communicator
from overlap.transport.objects import allgather_object

__all__ = ["Following"]


class _Rounds(Protocol):
    @property
    def retired(self) -> bool: ...  # nobody steps any more, on any rank
    def take_part(self) -> bool: ...  # in the others' next event; False where all have joined


class Following:
    """A rank's part in the rounds of one optimizer once it has joined, for `JoinedRanks`.

    `group`: the ranks whose steps this one makes, too.

    `optimizer` is the user's, whose hyper-parameters become those of the ranks that train.
    """

    def __init__(
        self,
        joined_ranks: JoinedRanks,
        control: Communicator,
        topic: str,
        group: Sequence[int],
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self._joined_ranks, self._control = joined_ranks, control
        self.topic, self.ranks, self._group = topic, range(control.size), frozenset(group)
        self.optimizer = optimizer
        self._rounds: weakref.ref[_Rounds] | None = None  # whose this is
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._missing: frozenset[int] = frozenset()  # who had not joined, when join() ended
        self._calls = 0  # of those that wait for all ranks
        self.obstacle = ""
        self.hyper_parameters: list[dict[str, Any]] = []  # they are told with each event

    def bind(self, rounds: _Rounds) -> None:
        """Follow `rounds`, as long as they live."""
        self._rounds = weakref.ref(rounds)

    # - On a rank that has joined

    @property
    def place(self) -> tuple[int, int]:
        return self._calls, 0

    def catch_up(self) -> None:
        """Do nothing: this object has no rounds of gradients."""

    def take_over(self, groups: list[dict[str, Any]]) -> None:
        """Do nothing: no hyper-parameters are told this way."""

    def keep_up(self, missing: Collection[int]) -> None:
        """Take part in the others' rounds, once all of this rank's group have joined; all ranks but `missing` have.

        Raises what that has raised.
        """
        self._missing = frozenset(missing)
        error, self._error = self._error, None
        if error is not None:
            raise error
        rounds = None if self._rounds is None else self._rounds()
        if self._thread is None and rounds is not None and not rounds.retired and self._group.isdisjoint(missing):
            self._thread = threading.Thread(target=self._run, args=(rounds,), name="dear-co2-join", daemon=True)
            self._thread.start()

    def _run(self, rounds: _Rounds) -> None:
        try:
            while rounds.take_part():
                pass
        except BaseException as error:
            self._error = error

    def arrive(self) -> None:
        """Wait, once all ranks have joined, until this rank has all that was averaged before."""
        if not self._missing:
            self.wait()

    def follow(self, word: Word) -> None:
        """Raise as the other ranks do, which have called what needs this rank."""
        if word.what == "call":
            self._gather(None, word.details["what"])
        else:
            raise CannotJoin(word.details["text"])

    # - On any rank

    @property
    def under_way(self) -> bool:
        """Whether this rank takes part in what others do, having joined."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Wait until no event follows: all ranks have joined, or end."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            error, self._error = self._error, None
            if error is not None:
                raise error

    def end(self) -> None:
        """Wait until this rank takes part no more, before anything else is done with the rounds."""
        if self._thread is not None:
            self._joined_ranks.check()
            self.wait()

    def call(self, what: str, mine: int) -> list[int]:
        """What each rank gives as `mine`, before `what`, which waits for all ranks. On every rank.

        Raises :class:`CannotJoin` on all of them where some have joined.
        """
        word = Word(self.topic, self._calls, 0, "call", {"what": what})
        self._joined_ranks.say(
            word, self.ranks, keep=True
        )  # whoever has joined, or does before coming here, comes here
        return self._gather(mine, what)

    def _gather(self, mine: int | None, what: str) -> list[int]:
        found = allgather_object(self._control, mine)
        self._calls += 1
        self._joined_ranks.let_go(self.topic, ("call",))
        joined = [rank for rank, given in enumerate(found) if given is None]
        if joined:
            raise self._joined_ranks.cannot_join(_needs_everybody(what, joined))
        return [given for given in found if given is not None]

    def refuse(self, what: str) -> None:
        """Raise :class:`CannotJoin`, there too, if ranks are known to have joined. Waits for nobody."""
        joined = sorted(self._joined_ranks.joined(self.topic))
        if joined and not self._joined_ranks.following:
            text = _needs_everybody(what, joined)
            word = Word(self.topic, self._calls, 0, "refused", {"text": text})
            self._joined_ranks.say(word, self.ranks, keep=False)
            raise self._joined_ranks.cannot_join(text)


def _needs_everybody(what: str, joined: Sequence[int]) -> str:
    return f"{what} needs every rank, and ranks {list(joined)} have joined; call it after join()"
