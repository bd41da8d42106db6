"""Answers other ranks' questions on a thread of its own, whatever the main thread does.

It is how rank 0 alone can ask the others for their share of the optimizer state, and how a rank that waits can learn
what the others are doing. Letters are plain data (`overlap.transport.encoding`). Handlers run on that thread and
must not issue collectives.
"""

from __future__ import annotations

import itertools
import logging
import struct
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from overlap.transport.communicator import Communicator
from overlap.transport.encoding import decode, encode

__all__ = ["NoAnswer", "PeerQueries"]

log = logging.getLogger("dear")

_LENGTH = struct.Struct("<Q")
_WAIT_SECONDS = 3600.0  # in one receive; close() wakes the thread with a letter to itself
_JOIN_SECONDS = 5.0


class NoAnswer(RuntimeError):
    """A rank did not answer in time, or answered that it could not."""


class PeerQueries:
    """Ask any rank a named question; answer the questions of others. World of one: nobody to ask."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._handlers: dict[str, Callable[[int, Any], Any]] = {}
        self._early: dict[str, list[tuple[int, bytes]]] = {}  # letters whose handler is not there yet
        self._over: set[str] = set()  # topics that had one
        self._patient: set[str] = set()  # topics whose handlers wait
        self._lock = threading.Lock()  # these four
        self._answers: dict[int, Future[Any]] = {}
        self._numbers = itertools.count()
        self._interrupted = ""  # why nobody answers any more
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        if comm.size > 1:
            self._thread = threading.Thread(target=self._run, name="dear-queries", daemon=True)
            self._thread.start()

    def on(self, topic: str, handler: Callable[[int, Any], Any], *, waits: bool = False) -> None:
        """Answer questions on `topic` with ``handler(asking rank, question)``; an exception travels back as text.

        What came earlier is answered now: a rank that is ahead may ask before this one can answer. A handler that `waits`,
        for what the script does, gets a thread for each question: what it waits for may hang on later letters.
        """
        with self._lock:
            self._handlers[topic] = handler
            if waits:
                self._patient.add(topic)
            early = topic in self._early
        if early:
            self._wake(topic)

    def off(self, topic: str) -> None:
        """Stop answering about `topic`, and anything below it (``topic/…``)."""
        with self._lock:
            self._over.add(topic)
            for table in (self._handlers, self._early):
                for name in [name for name in table if _below(name, topic)]:
                    table.pop(name)

    def ask(self, rank: int, topic: str, question: Any = None) -> Future[Any]:
        """Post a question; the future holds the answer, or :class:`NoAnswer`."""
        number = next(self._numbers)
        letter = _letter("ask", number, topic, question)
        future: Future[Any] = Future()
        self._answers[number] = future
        self._comm.post(rank, letter)
        if self._interrupted:
            self.interrupt(self._interrupted)
        return future

    def interrupt(self, why: str) -> None:
        """Fail all questions, those that are asked and those to come, with :class:`NoAnswer`. On any thread."""
        self._interrupted = why
        for number in list(self._answers):
            future = self._answers.pop(number, None)
            if future is not None:
                future.set_exception(NoAnswer(why))

    def tell(self, rank: int, topic: str, news: Any = None) -> None:
        """Post a message that needs no answer."""
        self._comm.post(rank, _letter("tell", 0, topic, news))

    @staticmethod
    def wait(future: Future[Any], rank: int, topic: str, timeout: float | None) -> Any:
        try:
            return future.result(timeout)
        except FutureTimeout:
            raise NoAnswer(f"rank {rank} did not answer {topic!r} within {timeout:g} s") from None

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                letter = self._comm.receive_post(_WAIT_SECONDS)
            except Exception as error:  # the communicator was closed or failed: nobody can write to us any more
                if not self._closing.is_set():
                    log.warning("rank %d: query thread stopped: %s", self._comm.rank, error)
                return
            if letter is None:
                continue
            try:
                self._open(*letter)
            except Exception as error:  # of this letter: the next ones can be read
                log.warning(
                    "rank %d: passed over a letter of rank %d: %s: %s",
                    self._comm.rank,
                    letter[0],
                    type(error).__name__,
                    error,
                )

    def _open(self, sender: int, payload: bytes) -> None:
        (length,) = _LENGTH.unpack_from(payload)
        kind, number, topic = decode(payload[_LENGTH.size : _LENGTH.size + length])
        content = payload[_LENGTH.size + length :]
        if kind == "answer":
            self._take(sender, number, topic, content)
            return
        with self._lock:
            handler = self._handlers.get(topic)
            ended = any(_below(topic, over) for over in self._over) if handler is None else False
            if handler is None and not ended and kind != "wake":
                self._early.setdefault(topic, []).append((sender, payload))
                return
            early = self._early.pop(topic, [])
        for letter in early:
            self._open(*letter)
        if kind == "wake":
            return
        if handler is not None and topic in self._patient:
            answering = (sender, kind, number, topic, handler, content)
            threading.Thread(target=self._answer_patiently, args=answering, name="dear-answer", daemon=True).start()
        else:
            self._answer(sender, kind, number, topic, handler, content)

    def _answer_patiently(self, sender: int, *question: Any) -> None:
        try:
            self._answer(sender, *question)
        except Exception as error:  # connections have ended meanwhile: nobody waits for it
            log.debug("rank %d: no answer to rank %d: %s", self._comm.rank, sender, error)

    def _answer(
        self, sender: int, kind: str, number: int, topic: str, handler: Callable[[int, Any], Any] | None, content: bytes
    ) -> None:
        try:
            asked = decode(content)
            if handler is None:
                raise LookupError(f"{topic!r} has ended")
            reply = _letter("answer", number, topic, (True, handler(sender, asked)))
        except Exception as error:  # of the handler, or of what it was to read or send: the thread has others to answer
            log.debug("rank %d: %s %r of rank %d", self._comm.rank, kind, topic, sender, exc_info=True)
            reply = _letter("answer", number, topic, (False, f"{type(error).__name__}: {error}"))
        if kind == "ask":
            self._comm.post(sender, reply)

    def _wake(self, topic: str) -> None:
        """Let the thread look at what is kept of `topic`, and at whether it should end."""
        self._comm.post(self._comm.rank, _letter("wake", 0, topic, None))

    def _take(self, sender: int, number: int, topic: str, content: bytes) -> None:
        future = self._answers.pop(number, None)
        if future is None:
            return
        try:
            good, value = decode(content)
        except Exception as error:
            good, value = False, f"its answer cannot be read here: {type(error).__name__}: {error}"
        if good:
            future.set_result(value)
        else:
            future.set_exception(NoAnswer(f"rank {sender} could not answer {topic!r}: {value}"))

    def close(self) -> None:
        self._closing.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._wake("")
            self._thread.join(_JOIN_SECONDS)


def _below(name: str, topic: str) -> bool:
    return name == topic or name.startswith(f"{topic}/")


def _letter(kind: str, number: int, topic: str, content: Any) -> bytes:
    """What it is about comes first, by itself: that can be read where the content cannot."""
    envelope = encode((kind, number, topic))
    return b"".join([_LENGTH.pack(len(envelope)), envelope, encode(content)])
