"""Keeps, in the store of torchrun's agents, which processes of a job are there; it outlives the processes.

Every process gives a sign of life a second. Who gives none for ten, or has a successor, is lost. Its members then end what
is under way on this generation's connections, and meet for the next one (`overlap.transport.torch.generations`), which
the first to know its members writes down: ``compare_set`` lets only one list stand. Who is not on it, because others took
it for lost, waits for the one after, as a process does that has just been started.

Keys, below ``dear/roster``: ``attempt/R`` tells how often rank R was started before; of each process, ``alive/M`` counts,
``begun/M`` is there once it has come out of ``init()``, ``ended/M`` once it has ended well, and ``given-up/M``, of which
``given-up`` counts, once others have given it up. ``latest`` is the number of a generation, perhaps of an earlier one;
``G/members`` are those of generation G, for which ``G/ready/M`` wait, of the last one (``G/regroup`` is there then) or
from without (``G/waiting``).
"""

from __future__ import annotations

import datetime
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch._C._distributed_c10d import PrefixStore, TCPStore

from overlap.transport.torch.generations import Member, is_over, next_generation

__all__ = ["JobOver", "Roster", "agents_store"]

log = logging.getLogger("dear")

_SIGN_SECONDS = 1.0
_LOST_SECONDS = 10.0
_WARN_SECONDS = 60.0
_LOOK_SECONDS = 0.1  # while a generation is awaited
_CORNER = "dear/roster"
_CONNECT = datetime.timedelta(seconds=60)  # agent 0 has opened the store before workers are started
_ATTEMPTS = 3


class JobOver(RuntimeError):
    """The others have come to the end of training."""


def agents_store(host: str, port: int, timeout: datetime.timedelta = _CONNECT) -> Any:
    """A connection to the store that torchrun's agent 0 has opened for workers; `timeout` is for whatever it waits for."""
    return TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)


class Roster:
    """This process, `me`, among the processes of a job that was started with `size`.

    `connect` gives a connection to the store.
    """

    def __init__(self, connect: Callable[[], Any], me: Member, size: int) -> None:
        self.me, self._size = me, size
        self._connect = connect
        self._store = PrefixStore(_CORNER, connect())
        self._signs = PrefixStore(_CORNER, connect())  # of the thread: the main one may block its own
        self.number, self.members = 0, list[Member]()
        self.news = ""  # why this generation cannot go on; empty while it can
        self.somebody_waits = False
        self.stayed = False  # in this generation from the one before
        self.late = False  # others have come out of init() before it
        self._telling = threading.Lock()  # of the last four and the next
        # By rank: the process that was started last, how many signs of life it has given, and since when.
        self._seen: dict[int, tuple[Member, int, float]] = {}
        self._seeing = threading.Lock()
        self._on_news: Callable[[], None] = _nothing
        self.on_given_up: Callable[[], None] = _nothing  # this process, by others
        self._to_give_up: list[Member] = []  # as soon as the thread comes to it
        self._given_up: set[Member] = set()
        self._seen_given_up = 0
        self._closing = threading.Event()
        self._signs.add(f"alive/{me}", 1)
        self._signs.set(f"host/{me.rank}", socket.gethostname())
        self._signs.set(f"attempt/{me.rank}", str(me.attempt))
        self._thread = threading.Thread(target=self._run, name="dear-roster", daemon=True)
        self._thread.start()

    # - Generations

    def regroup(self) -> int:
        """Wait for the next generation that includes this process. Its rank there; whether it :attr:`stayed`.

        Raises :class:`JobOver` where the others have ended meanwhile, and ``RuntimeError`` where the store is gone.
        """
        if not self._thread.is_alive():
            raise RuntimeError(f"nobody can meet without the store: {self.news}")
        self._on_news = _nothing
        last, was = self._read_latest(), self.members
        mine = self.number == last and bool(was)
        while True:
            number = last + 1
            self._store.set(f"{number}/ready/{self.me}", "")
            self._store.set(f"{number}/{'regroup' if mine else 'waiting'}", "")
            before = self._members(last)
            members = self._await(number, before)
            self._store.set("latest", str(number))
            if self.me in members:
                break
            last, mine = number, False
        with self._telling:
            self.number, self.members, self.news, self.somebody_waits = number, members, "", False
        begun = () if mine else self._having("begun/{}", members)
        self.stayed, self.late = mine, any(member != self.me for member in begun)
        return members.index(self.me)

    def begin(self) -> None:
        """Announce that this process is connected to the others, and comes out of ``init()``."""
        self._store.set(f"begun/{self.me}", "")

    def watch(self, on_news: Callable[[], None]) -> None:
        """Call `on_news`, on a thread of its own, once this generation cannot go on."""
        self._on_news = on_news
        if self.news:
            on_news()

    def _read_latest(self) -> int:
        number = int(self._store.get("latest")) if self._store.check(["latest"]) else 0
        while self._store.check([f"{number + 1}/members"]):
            number += 1
        return number

    def _members(self, number: int) -> list[Member]:
        return [Member.of(text) for text in json.loads(self._store.get(f"{number}/members"))] if number else []

    def _await(self, number: int, last: Sequence[Member]) -> list[Member]:
        key = f"{number}/members"
        warn_at = time.monotonic() + _WARN_SECONDS
        while not self._store.check([key]):
            there = self._there(self._store)
            ended = self._having("ended/{}", {*there, *last})
            alive = there - ended
            if self.me not in last and is_over(last, ended) and not alive.intersection(last):
                raise JobOver(f"rank {self.me.rank} comes when the others have come to the end of training")
            ready = self._having(f"{number}/ready/{{}}", alive)
            members = next_generation(last, alive, ready, self._size)
            if members is not None and self.me in members:
                self._store.compare_set(key, "", json.dumps([str(member) for member in members]))
                break
            if time.monotonic() > warn_at:
                warn_at += _WARN_SECONDS
                awaited = (
                    sorted(alive.intersection(last) - ready) or f"all {self._size}, of whom there are {len(ready)}"
                )
                log.warning("rank %d (%s) waits to meet others: %s", self.me.rank, self.me, awaited)
            time.sleep(_LOOK_SECONDS)
        return self._members(number)

    def _having(self, key: str, members: Collection[Member]) -> set[Member]:
        """Those of whom there is that key."""
        return {member for member in members if self._store.check([key.format(member)])}

    def place(self) -> tuple[int, int]:
        """This process's number among the ranks of its host, as they were started, and how many there are.

        Once a generation has met.
        """
        hosts = self._store.multi_get([f"host/{rank}" for rank in range(self._size)])
        mine = [rank for rank, host in enumerate(hosts) if host == hosts[self.me.rank]]
        return mine.index(self.me.rank), len(mine)

    # - Signs of life

    def _there(self, store: Any) -> set[Member]:
        """Of each rank, the process that was started last, if it has given a sign of life in the last seconds."""
        with self._seeing:
            unseen = [rank for rank in range(self._size) if rank not in self._seen]
            ranks = [*self._seen, *(rank for rank in unseen if store.check([f"attempt/{rank}"]))]
            attempts = store.multi_get([f"attempt/{rank}" for rank in ranks])
            newest = [Member(rank, int(attempt)) for rank, attempt in zip(ranks, attempts, strict=True)]
            signs = [int(count) for count in store.multi_get([f"alive/{member}" for member in newest])]
            now = time.monotonic()
            for member, count in zip(newest, signs, strict=True):
                if self._seen.get(member.rank, ())[:2] != (member, count):
                    self._seen[member.rank] = member, count, now
            return {
                member for member, _, since in self._seen.values() if now - since < _LOST_SECONDS or member == self.me
            } - self._given_up

    def _run(self) -> None:
        failed = 0
        while not self._closing.wait(_SIGN_SECONDS):
            try:
                if failed:
                    self._signs = PrefixStore(_CORNER, self._connect())
                self._signs.add(f"alive/{self.me}", 1)
                self._give_up_and_look()
                there = self._there(self._signs)
                if self.number and not self.news:
                    self._judge(there)
                failed = 0
            except Exception as error:  # the connection is gone, or agent 0 is
                failed += 1
                log.debug("rank %d: no sign of life could be given: %s", self.me.rank, error)
                if failed == _ATTEMPTS:
                    self._tell(self.number, f"the store of torchrun's agent 0 is gone: {error}")
                    return

    def give_up(self, ranks: Collection[int]) -> None:
        """Declare those ranks of this generation lost, whatever signs of life they give. Their processes end."""
        with self._telling:
            self._to_give_up += [self.members[rank] for rank in ranks]

    def _give_up_and_look(self) -> None:
        with self._telling:
            those, self._to_give_up = self._to_give_up, []
        for member in those:
            self._signs.set(f"given-up/{member}", "")
            self._signs.add("given-up", 1)
        count = int(self._signs.add("given-up", 0))
        if count != self._seen_given_up:
            with self._telling:
                members = {self.me, *self.members}
            self._given_up |= {member for member in members if self._signs.check([f"given-up/{member}"])}
            self._seen_given_up = count
            if self.me in self._given_up:
                self.on_given_up()

    def _judge(self, there: Collection[Member]) -> None:
        with self._telling:
            number, members = self.number, self.members
        waits = self._signs.check([f"{number + 1}/waiting"])
        with self._telling:
            if number != self.number:
                return  # ranks have met since
            self.somebody_waits = waits
        lost = [rank for rank, member in enumerate(members) if member not in there]
        if lost:
            self._tell(number, f"rank(s) {lost} of {len(members)} are lost")
        elif self._signs.check([f"{number + 1}/regroup"]):
            self._tell(number, "another rank has noticed that ranks have changed")

    def _tell(self, number: int, news: str) -> None:
        """Of generation `number`: there may be another one by now."""
        with self._telling:
            if number != self.number:
                return
            self.news = news
        try:
            self._on_news()
        except Exception as error:  # what it ends is ending
            log.debug("rank %d: %s", self.me.rank, error)

    def changes(self, seconds: float = _LOST_SECONDS + 5) -> bool:
        """Whether ranks have changed; waits up to `seconds` for that to be known."""
        until = time.monotonic() + seconds
        while not self.news and time.monotonic() < until:
            time.sleep(_LOOK_SECONDS)
        return bool(self.news)

    @property
    def ended(self) -> bool:
        """Whether :meth:`end` was called."""
        return self._closing.is_set()

    def end(self) -> None:
        """Announce that this process has come to the end of training."""
        self._closing.set()
        self._thread.join()
        try:
            self._store.set(f"ended/{self.me}", "")
        except RuntimeError as error:  # agent 0 has ended as well
            log.debug("the roster is gone: %s", error)


def _nothing() -> None:
    """Of this generation nobody wants to hear any more."""
