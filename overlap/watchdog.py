"""Nothing hangs in silence: who waits, for what, since when, and what the others are doing meanwhile."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from overlap.communicator import Communicator
from overlap.mailroom import Mailroom, NoAnswer
from overlap.settings import Settings

__all__ = ["Watchdog"]

log = logging.getLogger("dear")

_TOPIC = "status"
_LEAVING = "leaving"
_ANSWER_SECONDS = 5.0


class Watched(Protocol):
    """A communicator, or whatever else ranks wait in."""

    def pending(self) -> Sequence[Awaited]:
        """What is not finished."""


class Awaited(Protocol):
    """One thing that is not finished; a `Work` is one."""

    @property
    def seconds(self) -> float:
        """For how long it has not been."""

    def describe(self) -> str:
        """What it is, in one line."""


class Watchdog:
    """Looks at the oldest unfinished operation once a second.

    After ``DEAR_STALL_WARN_SECONDS`` (60) it asks every rank what it is doing and logs one message. A rank that does not
    answer, or that has already left, for ``DEAR_STALL_ABORT_SECONDS`` (600) will never come: the job is aborted with
    that message. A rank that answers is alive, however slow, and is waited for. 0 switches either off.
    """

    def __init__(
        self, comm: Communicator, control: Communicator, mailroom: Mailroom, host: str, settings: Settings
    ) -> None:
        self._comm, self._mailroom = comm, mailroom
        self._watched: list[Watched] = [comm, control]
        self._where = f"{host}, pid {os.getpid()}"
        self._warn_after = settings.stall_warn_seconds
        self._abort_after = settings.stall_abort_seconds
        self._left: set[int] = set()
        self._here = "training"
        self._last_warning = -math.inf
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        if comm.size > 1:
            mailroom.on(_TOPIC, lambda _sender, _question: self._describe())
            mailroom.on(_LEAVING, lambda sender, _news: self._left.add(sender))
            self._thread = threading.Thread(target=self._run, name="dear-watchdog", daemon=True)
            self._thread.start()

    def _describe(self) -> str:
        waiting = ", ".join(work.describe() for work in self._pending()[:3])
        return f"({self._where}) {self._here}; {'waiting in ' + waiting if waiting else 'no operation in flight'}"

    def _pending(self) -> list[Awaited]:
        return [work for source in self._watched for work in source.pending()]

    def watch(self, source: Watched) -> None:
        """Look at what is pending there too."""
        self._watched.append(source)

    @property
    def left(self) -> frozenset[int]:
        """Ranks that have said that they leave."""
        return frozenset(self._left)

    def leaving(self) -> None:
        """Tell the others that this rank will issue nothing more."""
        self._here = "in shutdown"
        for rank in range(self._comm.size):
            if rank != self._comm.rank:
                self._mailroom.tell(rank, _LEAVING)

    def _run(self) -> None:
        while not self._closing.wait(1.0):
            try:
                pending = self._pending()
            except Exception:  # the communicator is gone, and whoever waits on it was told
                return
            if pending:
                self._judge(max(pending, key=lambda work: work.seconds))

    def _judge(self, work: Awaited) -> None:
        now = time.monotonic()
        quiet = now - self._last_warning < self._warn_after
        late = self._warn_after and work.seconds > self._warn_after and not quiet
        dead = self._abort_after and work.seconds > self._abort_after
        if not (late or dead):
            return
        if late:  # an operation that is overdue is judged once a second, and goes on being reported
            self._last_warning = now
        answers = self._ask_all()
        silent = [rank for rank, answer in answers.items() if answer is None or rank in self._left]
        report = "\n".join(
            f"  rank {rank}: {answer or 'no answer'}{' (has left)' if rank in self._left else ''}"
            for rank, answer in answers.items()
        )
        text = f"rank {self._comm.rank} has waited {work.seconds:.0f} s for {work.describe()}. All ranks:\n{report}"
        if dead and silent and self._here == "training":
            log.error("%s\nrank(s) %s will not come; aborting the job", text, silent)
            self._comm.abort(1)
        elif late:
            log.warning("%s", text)

    def _ask_all(self) -> dict[int, str | None]:
        questions: dict[int, Future[Any]] = {
            rank: self._mailroom.ask(rank, _TOPIC) for rank in range(self._comm.size) if rank != self._comm.rank
        }
        answers: dict[int, str | None] = {self._comm.rank: self._describe()}
        for rank, question in questions.items():
            try:
                answers[rank] = Mailroom.wait(question, rank, _TOPIC, _ANSWER_SECONDS)
            except NoAnswer:
                answers[rank] = None
        return dict(sorted(answers.items()))

    def close(self) -> None:
        self._closing.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
