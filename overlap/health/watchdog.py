"""A thread that reports what every rank waits for, since when, and what the others are doing, or ends the job.

What the watchdog looks at: whatever ranks wait in.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from overlap.health.deadlock import Standing, Verdict, absent, behind, verdict
from overlap.health.explained import Awaited, Explained, Meaning
from overlap.health.stacks import Place, frames, places
from overlap.transport.communicator import Communicator
from overlap.transport.peer_queries import NoAnswer, PeerQueries
from overlap.transport.work import Line

__all__ = ["Awaited", "Names", "Watchdog", "Watched"]


log = logging.getLogger("dear")

_TOPIC = "status"
_LEAVING = "leaving"
_ANSWER_SECONDS = 5.0
_QUESTION_SECONDS = 8.0  # with what it takes to send a question, which may be a connection to a store far away
_NAP_SECONDS = 0.05
_CONNECTING, _TRAINING, _LEAVING_HERE = "connecting", "training", "in shutdown"
# Of the limit. From the first part on the others are asked from time to time, so that at the limit it is known of who does
# not answer whether that has been so for the second part: a rank whose interpreter is busy for seconds is not lost.
_DOUBTED, _SILENT, _ASKED_EVERY = 0.5, 0.4, 0.05
_GRACE_SECONDS = 5.0  # for what a rank that leaves had handed to its own threads, and for news on their way


class Watchdog:
    """Checks the oldest unfinished operation once a second.

    After ``DEAR_STALL_WARN_SECONDS`` (60) it asks every rank what it is doing and logs one message. After
    ``DEAR_STALL_ABORT_SECONDS`` (600) the job is ended with that message where it can be known that nobody goes on. 0
    switches either off. It is known

    * of a rank that does not answer any more, or that has already left, for so long,
    * within seconds, of a rank that has left before it came to an operation in which this one waits, or
    * if all ranks answer, and for so long each has been inside an operation that some other has not come to, while nothing
      changed anywhere (`overlap.health.deadlock`). Where all wait for operations by name, these raise; else the job is
      aborted.

    That holds from before the first operation of a session to its last one: a rank that leaves waits for the others, too.
    Nobody is asked on this thread, so that it looks at its clock whatever has become of the way to the others.

    A rank that computes, loads data, or is stopped in a debugger is not inside an operation, and is waited for; reports
    show where it is. Of its threads those count that have asked for operations by name, and the main one. In a job whose
    ranks may be lost (:attr:`give_up`), one that has done so for the second limit, while others wait for it, is given up.
    """

    def __init__(
        self,
        comm: Communicator,
        peer_queries: PeerQueries,
        host: str,
        *,
        warn_after: float,
        abort_after: float,
    ) -> None:
        """`warn_after` and `abort_after` are those two, in seconds."""
        self._comm, self._peer_queries = comm, peer_queries
        self._watched: list[Watched] = [comm]
        self._names: Names | None = None
        self._lock = threading.Lock()  # the next two
        self._picture: Any = None  # what this rank waits in, as long as it does nothing else
        self._still_since = 0.0
        self._progress: Any = None  # what this rank has issued and finished
        self._quiet_since = time.monotonic()
        self._where = f"{host}, pid {os.getpid()}"
        self._warn_after, self._abort_after = warn_after, abort_after
        self._hosts: Sequence[str] = ()
        self._left: dict[int, float] = {}  # and when
        self.is_patient: Callable[[], bool] = lambda: False  # out of data: it waits as long as others train
        self.give_up: Callable[[Collection[int]], None] | None = None  # ranks that others train on without
        self.meaning: Meaning = lambda _channel, _label: ""  # of what is under way, to whoever reads reports
        self.forsaken: Callable[[], str] = lambda: ""  # why nobody is over this process any more
        self._here = _CONNECTING
        self._leaving_since = 0.0
        self._asking: threading.Thread | None = None
        self._last_warning = self._last_question = -math.inf
        self._unanswered: dict[int, float] = {}  # ranks, and since when
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        if comm.size > 1:
            peer_queries.on(_TOPIC, lambda _sender, _question: self._standing())
            peer_queries.on(_LEAVING, lambda sender, _news: self._left.setdefault(sender, time.monotonic()))
            self._thread = threading.Thread(target=self._run, name="dear-watchdog", daemon=True)
            self._thread.start()

    def connected(self, hosts: Sequence[str], *, warn_after: float, abort_after: float) -> None:
        """Begin to watch, now that all ranks are there, with their `hosts` and the limits of all."""
        self._hosts, self._warn_after, self._abort_after = hosts, warn_after, abort_after
        self._here = _TRAINING

    def _describe(self) -> str:
        waiting = ", ".join(work.describe() for work in self._pending()[:3])
        return f"({self._where}) {self._here}; {'waiting in ' + waiting if waiting else 'no operation in flight'}"

    def _standing(self) -> Standing:
        names = self._names
        lines = self._look()
        with self._lock:
            still = 0.0 if self._picture is None else time.monotonic() - self._still_since
            quiet = time.monotonic() - self._quiet_since
        unfinished = any(line.unfinished for line in lines.values())
        waits = [names.waits_for_a_decision(thread) for thread in self._threads()] if names is not None else [False]
        return Standing(
            text=self._describe(),
            still_seconds=still,
            quiet_seconds=quiet,
            stack=self._stack(),
            lines=lines,
            undecided=0 if names is None else names.undecided,
            can_be_told=all(waits) and not unfinished,
        )

    def _stack(self) -> tuple[str, ...]:
        main = _main_thread()
        return frames(main) if places([main]) == {Place.OUTSIDE} else ()

    def _threads(self) -> set[int]:
        main = _main_thread()
        alive = {thread.ident for thread in threading.enumerate()}
        return {main, *(thread for thread in (self._names.threads if self._names else ()) if thread in alive)}

    def _look(self) -> dict[str, Line]:
        """Notice whether this rank goes on. Returns how far it has come on each communicator."""
        lines: dict[str, Line] = {}
        for source in list(self._watched):
            for name, line in source.lines().items():
                # One of a device is watched beside that of the host, which counts for both.
                other = lines.get(name, line)
                lines[name] = Line(max(line.issued, other.issued), max(line.unfinished, other.unfinished, key=len))
        asked, undecided = (0, 0) if self._names is None else (self._names.asked, self._names.undecided)
        found = places(self._threads())
        # Who has nothing under way waits for another thread, or reads and writes files.
        under_way = undecided or any(line.unfinished for line in lines.values())
        inside = found == {Place.AT_A_LOCK} or (Place.OUTSIDE not in found and under_way)
        progress = (lines, asked, undecided)
        picture = progress if inside and self._here == _TRAINING else None
        with self._lock:
            if progress != self._progress:
                self._progress, self._quiet_since = progress, time.monotonic()
            if picture is None or picture != self._picture:
                self._picture, self._still_since = picture, time.monotonic()
        return lines

    def _pending(self) -> list[Awaited]:
        """What this rank waits for, or may yet; letters that go by themselves are no part of it."""
        return [
            Explained(work, getattr(source, "name", ""), self.meaning)
            for source in self._watched
            for work in source.pending()
            if getattr(work, "op", "") != "post"
        ]

    def watch(self, source: Watched) -> None:
        """Watch what is pending in `source`, too."""
        self._watched.append(source)

    def watch_names(self, names: Names) -> None:
        """Watch the operations that are asked for by name, too."""
        self._names = names
        self.watch(names)

    @property
    def left(self) -> frozenset[int]:
        """The ranks that have said that they leave."""
        return frozenset(self._left)

    def leaving(self) -> None:
        """Tell the others that this rank will issue nothing more."""
        self._here, self._leaving_since = _LEAVING_HERE, time.monotonic()
        for rank in range(self._comm.size):
            if rank != self._comm.rank:
                self._peer_queries.tell(rank, _LEAVING)

    def _run(self) -> None:
        while not self._closing.wait(1.0):
            try:
                pending = [(work.seconds, True, work) for work in self._pending()]
                pending += [
                    (work.seconds, False, work) for work in (self._names.asked_by_others() if self._names else ())
                ]
                if not pending and self._here == _LEAVING_HERE:
                    pending = [(leave.seconds, True, leave) for leave in [_Leave(self._leaving_since)]]
                if self._abort_after and (why := self.forsaken()):
                    log.error("rank %d (%s): %s; this process ends", self._comm.rank, self._where, why)
                    self._comm.abort(1)
                if self._abort_after:
                    self._look()
            except Exception:  # the communicator is gone, and whoever waits on it was told
                return
            if pending:
                _, mine, work = max(pending, key=lambda one: one[0])
                self._judge(work, mine)

    def _judge(self, work: Awaited, mine: bool = True) -> None:
        """Of the oldest unfinished operation; `mine`: this rank waits in it, and not only others."""
        now = time.monotonic()
        quiet = now - self._last_warning < self._warn_after
        late = self._warn_after and work.seconds > self._warn_after and not quiet and not self.is_patient()
        doubted = self._is_older(work, _DOUBTED) and now - self._last_question > self._abort_after * _ASKED_EVERY
        here = self._standing()
        training = self._here == _TRAINING
        left = self._left_for(_GRACE_SECONDS)
        forsaken = self._abort_after and training and left and here.still_seconds > _GRACE_SECONDS
        if not (late or doubted or self._is_older(work, 1.0) or forsaken):
            return
        if late:  # an operation that is overdue is judged once a second, and goes on being reported
            self._last_warning = now
        answers = self._ask_all()
        self._note(answers, now)
        if self._closing.is_set() or getattr(work, "done", bool)():
            return  # it ended while others were asked
        dead = self._is_older(work, 1.0)
        gone = self._left_for(self._abort_after) if training else []
        silent = [rank for rank in answers if rank in gone or self._is_silent(rank)]
        missing = behind(here.lines, {rank: answer.lines for rank, answer in answers.items() if answer})
        lost = [rank for rank in missing if forsaken and rank in left]
        report = "\n".join(self._told(rank, answer) for rank, answer in answers.items())
        waited = f"has waited {work.seconds:.0f} s"
        text = f"rank {self._comm.rank} {waited} for {work.describe()}" if mine else f"{work.describe()} {waited}"
        text += f". All ranks:\n{report}"
        if missing:
            text += (
                f"\nrank(s) {missing} have not come to what rank {self._comm.rank} waits in: fewer steps there "
                "(join() is for uneven data), or a branch that not all ranks take?"
            )
        if lost or (dead and silent):
            log.error("%s\nrank(s) %s will not come; aborting the job", text, self._named(lost or silent))
            self._comm.abort(1)
        elif dead and (absentees := self._absentees(answers, answers if here.undecided else missing)):
            log.error("%s\nrank(s) %s are given up", text, self._named(absentees))
        elif not (dead and None not in answers.values() and self._end(answers, report)) and late:
            log.warning("%s", text)

    def _is_older(self, work: Awaited, part: float) -> bool:
        """Whether an operation has not ended for this part of the limit, if there is one."""
        return bool(self._abort_after and work.seconds > self._abort_after * part)

    def _note(self, answers: Mapping[int, Standing | None], asked: float) -> None:
        """Who has not answered a question that was `asked` then."""
        self._last_question = asked
        self._unanswered = {
            rank: self._unanswered.get(rank, asked) for rank, answer in answers.items() if answer is None
        }

    def _is_silent(self, rank: int) -> bool:
        """Whether it has answered nothing for long, of which a busy interpreter is no explanation."""
        since = self._unanswered.get(rank, math.inf)
        return time.monotonic() - since > self._abort_after * _SILENT

    def _left_for(self, seconds: float) -> list[int]:
        """The ranks that said more than so long ago that they leave."""
        now = time.monotonic()
        return [rank for rank, since in list(self._left.items()) if now - since > seconds]

    def _absentees(self, answers: Mapping[int, Standing | None], awaited: Iterable[int]) -> list[int]:
        """Of those that this rank may wait for, which are given up just now, where ranks may be lost."""
        if self.give_up is None or self.is_patient() or self._here != _TRAINING:
            return []
        found = absent(answers, awaited, self._abort_after)
        if found:
            self.give_up(found)
        return found

    def _told(self, rank: int, answer: Standing | None) -> str:
        where = f" ({self._hosts[rank]})" if answer is None and self._hosts else ""
        text = f"  rank {rank}: {answer.text if answer else f'no answer{where}'}"
        text += " (has left)" if rank in self._left else ""
        return "\n    ".join([text, *(answer.stack if answer else ())])

    def _named(self, ranks: Sequence[int]) -> str:
        hosts = list(dict.fromkeys(self._hosts[rank] for rank in ranks)) if self._hosts else []
        return f"{list(ranks)} on {', '.join(hosts)}" if hosts else f"{list(ranks)}"

    def _end(self, answers: Mapping[int, Standing | None], report: str) -> bool:
        """End a job in which nobody goes on: by an exception, which rank 0 sends to all, or at once. False: not yet."""
        found = verdict([answer for answer in answers.values() if answer is not None], self._abort_after)
        if found is Verdict.WAIT:
            return False
        text = (
            f"every rank has waited for {self._abort_after:g} s (DEAR_STALL_ABORT_SECONDS) in an operation that some other "
            f"rank never comes to:\n{report}"
        )
        if found is Verdict.RAISE and self._names is not None:
            if self._comm.rank == 0:  # which knows of every operation by name, and so judges it, too
                self._names.give_up(text)
        elif self._comm.rank == min(rank for rank, answer in answers.items() if answer and answer.waits):
            log.error("%s\naborting the job", text)
            self._comm.abort(1)
        return True

    def _ask_all(self) -> dict[int, Standing | None]:
        """What every rank says of itself; None where one does not answer, or cannot be asked."""
        others = [rank for rank in range(self._comm.size) if rank != self._comm.rank]
        answers: dict[int, Standing | None] = dict.fromkeys(others)
        if self._asking is None or not self._asking.is_alive():  # else the last question is on its way still
            found: dict[int, Standing | None] = {}
            self._asking = threading.Thread(target=self._ask, args=(others, found), name="dear-questions", daemon=True)
            self._asking.start()
            until = time.monotonic() + _QUESTION_SECONDS
            while self._asking.is_alive() and time.monotonic() < until and not self._closing.is_set():
                self._asking.join(_NAP_SECONDS)
            answers |= found.copy()
        answers[self._comm.rank] = self._standing()
        return dict(sorted(answers.items()))

    def _ask(self, others: Sequence[int], found: dict[int, Standing | None]) -> None:
        questions: dict[int, Future[Any]] = {}
        with contextlib.suppress(Exception):  # the store through which letters go, or the communicator, is gone
            for rank in others:
                questions[rank] = self._peer_queries.ask(rank, _TOPIC)
        until = time.monotonic() + _ANSWER_SECONDS
        for rank, question in questions.items():
            with contextlib.suppress(NoAnswer):
                left = max(0.0, until - time.monotonic())
                found[rank] = PeerQueries.wait(question, rank, _TOPIC, left)

    def close(self) -> None:
        self._closing.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()


def _main_thread() -> int:
    main = threading.main_thread().ident
    assert main is not None, "it runs"
    return main


class _Leave:
    """What a rank that leaves waits for where it has nothing under way."""

    def __init__(self, since: float) -> None:
        self._since = since

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._since

    def describe(self) -> str:
        return "the others to leave as well"


class Watched(Protocol):
    """An object in which ranks wait: a communicator, for instance."""

    def pending(self) -> Sequence[Awaited]:
        """Everything that is not finished."""

    def lines(self) -> Mapping[str, Line]:
        """How far this rank has come on its communicators."""


class Names(Watched, Protocol):
    """The source of operations that ranks ask for by name: `overlap.horovod.controller.runtime.Runtime`."""

    def asked_by_others(self) -> Sequence[Awaited]: ...
    @property
    def asked(self) -> int: ...
    @property
    def undecided(self) -> int: ...
    @property
    def threads(self) -> Collection[int]: ...
    def waits_for_a_decision(self, thread: int) -> bool: ...
    def give_up(self, reason: str) -> None: ...
