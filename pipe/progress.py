"""What the stages of a rank wait for: for the watchdog, whose reports name the micro-batch, and for errors.

rank 1    F0 … F1 … B0                  in each gap its reports say for which message it waits, and whose
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from overlap.job.session import Session, current
from overlap.transport.work import Line

__all__ = ["BACKWARD", "FORWARD", "Message", "Progress", "progress_of_job"]

FORWARD, BACKWARD = "forward", "backward"


class Message(NamedTuple):
    """A message that a stage has to have before it works on a micro-batch."""

    before: str
    """FORWARD or BACKWARD."""
    micro_batch: int
    stage: int
    source: int
    """The stage that sends it."""
    rank: int
    """That one's rank in the job."""

    def __str__(self) -> str:
        sender = f"stage {self.source} (rank {self.rank})"
        what = "forward's input" if self.before == FORWARD else "backward's gradient"
        return f"{what} of micro-batch {self.micro_batch} of stage {self.stage}, from {sender}"


class _Wait:
    """A rank's wait for a message, as the watchdog sees it."""

    op, label = "receive", ""

    def __init__(self, progress: Progress, what: str, since: float) -> None:
        self._progress, self._what, self._since = progress, what, since

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._since

    def done(self) -> bool:
        return self._progress.idle_since != self._since

    def describe(self) -> str:
        return self._what


class Progress:
    """What the stages of this rank compute, and wait for; the job's watchdog reads it on its own thread.

    Whatever that thread reads is replaced, and never changed.
    """

    name = "pipeline"

    def __init__(self) -> None:
        self._messages: tuple[Message, ...] = ()
        self._in_step = False
        self._begun = False
        self.idle_since = 0.0
        self.at = ""
        """What is computed, or failed in that; empty: this rank waits for a message."""

    @contextmanager
    def step(self) -> Iterator[None]:
        """A context in which stages have messages for one another."""
        self._messages, self.at, self._begun = (), "", False
        self.idle_since, self._in_step = time.monotonic(), True
        try:
            yield
        finally:
            self._in_step = False

    def expect(self, message: Message) -> None:
        """`message` is to be received now, or soon."""
        self._messages = (*self._messages, message)

    @contextmanager
    def computing(self, what: str) -> Iterator[None]:
        """A context in which a stage computes; after an error, :attr:`at` goes on saying what."""
        self.at = what
        yield
        self.idle_since, self.at = time.monotonic(), ""

    @contextmanager
    def working(self, what: str, micro_batch: int, stage: int) -> Iterator[None]:
        """A context in which a stage computes FORWARD or BACKWARD of a micro-batch, whose message it has."""
        self._messages = tuple(each for each in self._messages if each[:3] != (what, micro_batch, stage))
        self._begun = True
        with self.computing(f"{what} of micro-batch {micro_batch} in stage {stage}"):
            yield

    @property
    def awaited(self) -> tuple[str, ...]:
        """What this rank waits for, in words; nothing while it computes, and outside of steps."""
        if not self._in_step or self.at:
            return ()
        rest = "the last messages of the step to arrive" if self._begun else "the shapes of the first micro-batch"
        return tuple(map(str, self._messages)) or (rest,)

    @property
    def sources(self) -> frozenset[int]:
        """The ranks, in the job, whose messages this rank waits for, as far as it is known."""
        return frozenset(each.rank for each in self._messages)

    def pending(self) -> list[_Wait]:
        """As a communicator's."""
        since = self.idle_since
        return [_Wait(self, what, since) for what in self.awaited]

    def lines(self) -> Mapping[str, Line]:
        """None: ranks of a pipeline have different numbers of messages."""
        return {}


_of_jobs: weakref.WeakKeyDictionary[Session, Progress] = weakref.WeakKeyDictionary()


def progress_of_job() -> Progress:
    """That of this rank, whichever of its pipelines makes a step; the watchdog looks at it from now on."""
    session = current()
    if session not in _of_jobs:
        _of_jobs[session] = Progress()
        session.watchdog.watch(_of_jobs[session])
    return _of_jobs[session]
