"""``join()``: ranks that are out of data take part in the steps of all distributed optimizers of a process.

[Note: who has joined by when]
A rank that joins tells the others' query threads the round of each optimizer from which on it contributes nothing,
and waits for their receipts. Only then it issues its part of such a round, and of its tally. So whoever has read a tally
has been told: all ranks know the same, and no message is sent while nobody joins.

[Note: whose join has failed]
A rank whose join() has raised follows nobody any more, and the others go on counting it as joined until they have called
join(), too. What it would send until then belongs to rounds that it has no part in. So nothing goes on, there and on those
that have raised with it: each goes on when it has called join(), the one that failed again.

[Note: who has joined follows words]
What happens between a round's reductions and the next (a step, clipping, a skipped step, another optimizer's round …) is
the script's decision, which a joined rank does not run. Ranks that still contribute say each such thing in a letter to
everybody who has joined; what was said before they knew is in the receipt. All scripts do the same in the same order, so
every rank says the same words: the first letter with a word counts, its number tells the others from it.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from overlap.job.session import Session
from overlap.transport.communicator import Communicator
from overlap.transport.encoding import travels
from overlap.transport.peer_queries import PeerQueries

__all__ = ["CannotJoin", "JoinedRanks", "News", "Word", "joined_ranks_of"]

_JOINED, _WORD = "join/joined", "join/word"
_NOBODYS = ""  # the topic of words about no optimizer
_RECEIPT_SECONDS = 600.0
_LOOK_SECONDS = 1.0


class CannotJoin(RuntimeError):
    """Other ranks do something that needs a rank which has joined."""


@travels
@dataclass(frozen=True)
class Word:
    """A message about what scripts do with one optimizer: number `number` of its round `round`."""

    topic: str
    round: int
    number: int
    what: str
    details: dict[str, Any]


@travels
@dataclass(frozen=True)
class News:
    """A message that a rank has joined: by topic, the first round without it, and why it cannot take part, if so."""

    generation: int
    rounds: dict[str, int]
    obstacles: dict[str, str]
    groups: dict[str, list[dict[str, Any]]]  # hyper-parameters, as the rank's script left them


class _Optimizer(Protocol):
    @property
    def topic(self) -> str: ...
    @property
    def ranks(self) -> Collection[int]: ...  # of the job
    @property
    def place(self) -> tuple[int, int]: ...  # its round, and the number of the next word in it
    @property
    def obstacle(self) -> str: ...  # why this rank cannot join now, or ""
    def catch_up(self) -> None: ...  # with others, who are past the current round and have dropped it
    def keep_up(self, missing: Collection[int]) -> None: ...  # in what takes no words: all but these have joined
    @property
    def hyper_parameters(self) -> list[dict[str, Any]]: ...
    def take_over(self, groups: list[dict[str, Any]]) -> None: ...
    def arrive(self) -> None: ...
    def follow(self, word: Word) -> None: ...


class JoinedRanks:
    """The ranks of the job that have joined, and this rank's part once it is one of them.

    A generation ends when all have joined.
    """

    def __init__(
        self,
        comm: Communicator,
        peer_queries: PeerQueries,
        left: Callable[[], Collection[int]],
        heed: Callable[[], None],
    ) -> None:
        """`left`: who has left the job. `heed` raises where ranks are lost."""
        self._rank, self._size, self._peer_queries = comm.rank, comm.size, peer_queries
        self._left, self._heed = left, heed
        self._lock = threading.Lock()
        self._generation = 0
        self._joined: dict[int, dict[int, News]] = defaultdict(dict)  # by generation and rank
        self.away: set[int] = set()  # who has joined, of a later generation, too
        self._said: list[Word] = []  # what a rank that joins now may have to catch up with
        self._behind: dict[str, int] = {}  # rounds of each optimizer, of those too that the script dropped since
        self._optimizers: weakref.WeakValueDictionary[str, _Optimizer] = weakref.WeakValueDictionary()
        self._heard: queue.Queue[tuple[int, Word | int]] = (
            queue.Queue()
        )  # generation; a word, or a rank that has joined
        self._waiting_for_all: Word | None = None
        self._over: set[str] = set()  # optimizers that cannot go on
        self.following = False  # this rank has joined
        self._failed: dict[int, str] = {}  # by rank: why its join() has raised; others', where this rank needed them
        peer_queries.on(_JOINED, self._hear_joined)
        peer_queries.on(_WORD, lambda _sender, letter: self._heard.put(letter))

    def enroll(self, optimizer: _Optimizer) -> None:
        """From now on, take part in this optimizer's rounds too, as long as it lives."""
        self._optimizers[optimizer.topic] = optimizer

    @property
    def joined_now(self) -> list[int]:
        """The ranks that are known to have joined."""
        return sorted(self._joined.get(self._generation, {}))

    def joined(self, topic: str) -> dict[int, int]:
        """The joined ranks, with the first round of the optimizer to which each contributes nothing."""
        found = self._joined.get(self._generation, {})
        return {rank: news.rounds[topic] for rank, news in list(found.items()) if topic in news.rounds}

    def obstacles(self, topic: str) -> dict[int, str]:
        """Of the joined ranks that cannot take part in the optimizer's rounds: why."""
        found = self._joined.get(self._generation, {})
        return {rank: news.obstacles[topic] for rank, news in list(found.items()) if topic in news.obstacles}

    def say(self, word: Word, ranks: Collection[int], *, keep: bool) -> None:
        """Tell those of `ranks` that have joined; with `keep`, those too that join before the next round is over."""
        if self.following or self._size == 1:
            return
        with self._lock:
            if keep:
                self._said.append(word)
            away = [rank for rank in self._joined.get(self._generation, {}) if rank in ranks]
        for rank in away:
            self._peer_queries.tell(rank, _WORD, (self._generation, word))

    @contextlib.contextmanager
    def needing_everybody(self, what: str) -> Iterator[None]:
        """Around what waits for all ranks. Raises :class:`CannotJoin` if some have joined, there too."""
        word = Word(_NOBODYS, 0, 0, "refused", {"text": f"{what} needs every rank; rank {self._rank} is in it"})
        with self._lock:
            away = sorted(self._joined.get(self._generation, {}))
            self._waiting_for_all = word
        try:
            if away:
                for rank in away:
                    self._peer_queries.tell(rank, _WORD, (self._generation, word))
                raise self.cannot_join(f"{what} needs every rank, and ranks {away} have joined; call it after join()")
            yield
        finally:
            self._waiting_for_all = None

    # - [Note: whose join has failed]

    def cannot_join(self, text: str) -> CannotJoin:
        """What is to be raised where ranks have joined that cannot: their join() raises, too."""
        self._failed |= {rank: text for rank in self.joined_now if rank not in self._failed}
        return CannotJoin(text)

    @property
    def failed_here(self) -> bool:
        """Whether this rank's join() has raised, and the script has not called it again."""
        return self._rank in self._failed

    def come_back(self) -> None:
        """Note that this rank has called join() again, as all others have called it."""
        self._failed.clear()

    def check(self) -> None:
        """Raise :class:`CannotJoin` where some rank's join() has failed, and this rank has not called it since."""
        for rank, text in self._failed.items():
            raise CannotJoin(f"join() has failed on rank {rank}, and nothing goes on until every rank calls it: {text}")

    def closed(self, topic: str, rounds: int) -> None:
        """Note that so many rounds of the optimizer are over here; nobody can have missed one before the last."""
        self._behind[topic] = rounds
        if self._said:
            with self._lock:
                self._said = [word for word in self._said if word.topic != topic or word.round >= rounds - 1]

    def let_go(self, topic: str, what: Collection[str]) -> None:
        """Forget words that every rank has heard, or whose content it has carried out by itself."""
        with self._lock:
            self._said = [word for word in self._said if word.topic != topic or word.what not in what]

    def unsay(self, topic: str) -> None:
        """Withdraw what was said of an optimizer that cannot go on, here or on any rank."""
        self._over.add(topic)
        with self._lock:
            self._said = [word for word in self._said if word.topic != topic]

    def forget(self, topic: str) -> None:
        """Forget an optimizer that all ranks have dropped."""
        self._behind.pop(topic, None)
        self.unsay(topic)
        self._over.discard(topic)

    def _hear_joined(self, sender: int, news: News) -> list[Word]:
        with self._lock:
            self._joined[news.generation][sender] = news
            self.away.add(sender)
            # What was said before this rank, too, joined: who is out of data once more has missed nothing of it.
            missed = self._said if news.generation == self._generation else []
            said = [word for word in missed if word.round >= news.rounds.get(word.topic, word.round)]
            # A round that was only begun may be nobody's, its optimizer garbage here and gone there. If not, more is said.
            said = [word for word in said if word.what != "open" or word.topic in news.groups]
            if self._waiting_for_all is not None:
                said.append(self._waiting_for_all)
        self._heard.put((news.generation, sender))
        alive = dict(self._optimizers.items())
        return [w for w in said if w.topic == _NOBODYS or (w.topic in alive and sender in alive[w.topic].ranks)]

    def join(self) -> None:
        """Take part in the others' rounds, contributing nothing, until every rank has come here, or one has left."""
        if self._size == 1:
            return
        mine = dict(self._optimizers.items())
        for optimizer in mine.values():
            optimizer.arrive()
        rounds = self._behind | {topic: optimizer.place[0] for topic, optimizer in mine.items()}
        obstacles = {topic: optimizer.obstacle for topic, optimizer in mine.items() if optimizer.obstacle}
        groups = {topic: optimizer.hyper_parameters for topic, optimizer in mine.items()}
        news = News(self._generation, rounds, obstacles, groups)
        with self._lock:
            self._joined[self._generation][self._rank] = news
            self.away.add(self._rank)
        self.following = True
        try:
            others = [rank for rank in range(self._size) if rank != self._rank]
            asked = [(rank, self._peer_queries.ask(rank, _JOINED, news)) for rank in others]
            receipts = [PeerQueries.wait(receipt, rank, _JOINED, _RECEIPT_SECONDS) for rank, receipt in asked]
            for receipt in sorted(receipts, key=len, reverse=True):  # each holds the first ones of the same words
                for word in receipt:
                    self._follow(word)
            self._follow_until_all_are_here()
            for topic, optimizer in dict(self._optimizers.items()).items():
                optimizer.arrive()  # while it is known who contributed
                self._catch_up(topic, optimizer)
            self._failed.clear()
        except BaseException as error:
            self._failed = {self._rank: str(error) or type(error).__name__}
            with contextlib.suppress(Exception):  # of what has raised this error, perhaps
                self._keep_up(())  # no words are followed any more
            raise
        finally:
            self.following = False
            with self._lock:
                self._joined.pop(self._generation, None)
                self._generation += 1
                self.away.intersection_update(self._joined.get(self._generation, {}))
                self._said.clear()  # before all came here, as every rank has: nobody has to catch up with it any more

    def _follow_until_all_are_here(self) -> None:
        missing = set(range(self._size)) - {self._rank}
        later = []
        while missing and not (missing.intersection(self._left()) and self._heard.empty()):
            self._heed()
            self._keep_up(missing)
            try:
                generation, heard = self._heard.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                continue
            if generation > self._generation:  # of a rank that was here, and is out of data again
                later.append((generation, heard))
            elif generation < self._generation:
                continue  # this rank could not go on in that one
            elif isinstance(heard, Word):
                self._follow(heard)
            else:
                missing.discard(heard)
        for letter in later:
            self._heard.put(letter)
        self._keep_up(missing)

    def _keep_up(self, missing: Collection[int]) -> None:
        for optimizer in list(self._optimizers.values()):
            optimizer.keep_up(missing)

    def _catch_up(self, topic: str, optimizer: _Optimizer) -> None:
        """Go on with the hyper-parameters of those who joined last, whose scripts may have changed them since."""
        found = self._joined[self._generation].items()
        news = {rank: news for rank, news in found if topic in news.groups and rank in optimizer.ranks}
        last = max(news, key=lambda rank: (news[rank].rounds[topic], -rank), default=self._rank)
        if last != self._rank and news[last].rounds[topic] > news[self._rank].rounds[topic]:
            optimizer.take_over(news[last].groups[topic])

    def _follow(self, word: Word) -> None:
        if word.topic == _NOBODYS:
            raise CannotJoin(f"rank {self._rank} has joined: {word.details['text']}")
        optimizer = self._optimizers.get(word.topic)
        if optimizer is None and word.topic in self._over:
            return  # the others have yet to see that it is
        if optimizer is None:
            raise RuntimeError(
                f"other ranks go on with the distributed optimizer {word.topic!r}, which is gone on rank {self._rank}, "
                "that has joined; keep it until join() returns"
            )
        place = (word.round, word.number)
        if word.round > optimizer.place[0]:
            optimizer.catch_up()
        if place > optimizer.place:
            raise RuntimeError(f"after join(), rank {self._rank} is at {optimizer.place} and is told {word}")
        if place == optimizer.place:  # else another rank has said it before
            optimizer.follow(word)


def joined_ranks_of(session: Session) -> JoinedRanks:
    """The :class:`JoinedRanks` of `session`, which takes part in every ``join()`` from the first call on."""
    for participant in session.participants:
        if isinstance(participant, JoinedRanks):
            return participant
    watchdog = session.watchdog
    joined_ranks = JoinedRanks(session.comm, session.peer_queries, lambda: watchdog.left, session.heed)
    watchdog.is_patient = lambda: joined_ranks.following
    session.participants.append(joined_ranks)
    return joined_ranks
