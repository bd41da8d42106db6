"""A thread that carries out a communicator's operations in the order in which they were issued.

[Note: inference mode]
What is issued inside ``torch.inference_mode()`` may be written nowhere else, and that mode is a thread's own. Ordinary
tensors may be written there as ever, so every task runs in it, on whatever thread.

[Note: who posts]
Posting never blocks, so the caller does it when no operation is ahead, which saves waiting for the thread to wake up.
Behind another operation it is the thread's, after that one has finished: it may read what that one writes.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.autograd import profiler

import comm_core
from comm_core import TransportError
from overlap.transport.checks import check_timeout
from overlap.transport.compilers import outside_compilers
from overlap.transport.forks import Origin

__all__ = ["PendingWork", "Task", "WorkerThread"]

_AFTER = "the communicator has failed before, so this operation was not begun; its first failure"
SLOW_SECONDS = 2.0  # until a wait is worth asking why


class Task(ABC):
    """The work of an operation: `post`, then `finish`, each once."""

    @abstractmethod
    def post(self) -> None:
        """Start what does not have to wait. Never blocks."""

    @abstractmethod
    def finish(self) -> None:
        """Finish the operation."""

    @abstractmethod
    def ask(self) -> None:
        """Ask why this operation, the first in line, takes so long. Waits for nobody."""

    @abstractmethod
    def fail(self) -> None:
        """Release the peers after an error, since they must not wait for what will never come."""


class PendingWork:
    """An issued operation, a `overlap.transport.communicator.Work`."""

    def __init__(
        self, kind: str, label: str, rank: int, size: int, nbytes: int, slow: Callable[[], None] = lambda: None
    ) -> None:
        """`slow` is called, on a thread that waits, when that takes longer than ``SLOW_SECONDS``."""
        self.op, self.label, self.nbytes, self._slow = kind, label or kind, nbytes, slow
        self._what = f"{kind} {label!r}" if label else kind
        self._where = f"rank {rank} of {size}, {nbytes} bytes"
        self._issued = time.monotonic()
        self._ended: float | None = None
        self._error: comm_core.Error | None = None
        self._origin = Origin()
        # A bare lock, held until the end: waking its waiter takes a third of what threading.Event needs for it.
        self._unfinished = threading.Lock()
        self._unfinished.acquire()

    @property
    def seconds(self) -> float:
        return (time.monotonic() if self._ended is None else self._ended) - self._issued

    def wait(self, timeout: float | None = None) -> None:
        limit = check_timeout("wait", timeout)
        if self._ended is None:
            self._origin.require()  # nobody would ever finish it
            if not self._ends_within(limit):
                raise comm_core.TimeoutError(f"{self.describe()} was not done within {limit:g} s")
            self._unfinished.release()  # for whoever else waits
        if self._error is not None:
            raise self._error

    def _ends_within(self, limit: float | None) -> bool:
        """Takes the lock where it does."""
        if limit is not None and limit <= SLOW_SECONDS:
            return self._unfinished.acquire(timeout=limit)
        if self._unfinished.acquire(timeout=SLOW_SECONDS):
            return True
        self._slow()
        return self._unfinished.acquire(timeout=-1 if limit is None else limit - SLOW_SECONDS)

    def done(self) -> bool:
        return self._ended is not None

    def exception(self) -> comm_core.Error | None:
        return self._error

    def order_before(self, stream: int) -> None:
        self.wait()

    def describe(self) -> str:
        state = "running" if not self.done() else "failed" if self._error else "done"
        return f"{self._what} ({self._where}, {state}, {self.seconds:.1f} s)"

    def blamed(self, error: BaseException) -> comm_core.Error:
        """The error to raise where this operation ended with `error`."""
        kind = type(error) if isinstance(error, comm_core.Error) else TransportError
        return kind(f"{self._what} ({self._where}): {error}")

    def finish(self, error: BaseException | None = None) -> None:
        self._error = None if error is None else self.blamed(error)
        self._ended = time.monotonic()
        self._unfinished.release()


@contextmanager
def _unrecorded() -> Iterator[None]:
    """Inside, this thread hides what it does from torch's profiler.

    torch 2.13's crashes, when its result is freed, where an operation of gloo's ends after the profile has. What is issued
    and waited for is shown without that (`overlap.transport.work`).
    """
    if not profiler._is_profiler_enabled:
        yield
        return
    torch.autograd._enable_record_function(False)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.autograd._enable_record_function(True)  # type: ignore[attr-defined]


class _Entry:
    """An operation in line."""

    def __init__(self, work: PendingWork, task: Task) -> None:
        self.work, self.task = work, task
        self.posted = False
        self.error: BaseException | None = None


class WorkerThread:
    """Finishes tasks one after the other on a daemon thread, started with the first one. See [Note: who posts].

    After a task failed the peers are out of step, so every later one fails at once, and names the first.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()  # guards everything below
        self._line: deque[_Entry] = deque()  # the first one is being finished
        self._failure: comm_core.Error | None = None  # what every operation ends with that comes after the failed one
        self._closed = False
        self._thread: threading.Thread | None = None

    @outside_compilers
    def submit(self, work: PendingWork, task: Task) -> PendingWork:
        entry = _Entry(work, task)
        with self._changed:
            if self._closed:
                raise comm_core.InvalidUsage(f"{self._name}: the communicator is closed")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._line.append(entry)
            self._post_first()
            self._changed.notify()
        if entry.error is not None and not isinstance(entry.error, Exception):
            raise entry.error  # Ctrl-C while we posted is the caller's
        return work

    def pending(self) -> list[PendingWork]:
        with self._changed:
            return [entry.work for entry in self._line]

    def ask_first(self) -> None:
        """Have the operation that is being carried out ask why it takes so long."""
        with self._changed:
            task = self._line[0].task if self._line else None
        if task is not None:
            task.ask()

    def _post_first(self) -> None:
        """With the lock held."""
        if self._line and not self._line[0].posted:
            entry = self._line[0]
            entry.posted = True
            self._attempt(entry, entry.task.post)

    def _attempt(self, entry: _Entry, part: Callable[[], None]) -> None:
        entry.error = entry.error or self._failure
        if entry.error is not None:
            return
        try:
            with torch.inference_mode(), _unrecorded():  # [Note: inference mode]
                part()
        except BaseException as raised:  # it belongs to whoever waits for the work
            entry.error = raised
            self._failure = TransportError(f"{_AFTER}: {entry.work.blamed(raised)}")
            entry.task.fail()

    def _run(self) -> None:
        while (entry := self._first()) is not None:
            self._attempt(entry, entry.task.finish)
            with self._changed:
                self._line.popleft()
                self._post_first()
            work, error = entry.work, entry.error
            del entry  # the task keeps the caller's tensors alive, and only until here
            work.finish(error)

    def _first(self) -> _Entry | None:
        with self._changed:
            while not self._line and not self._closed:
                self._changed.wait()
            return self._line[0] if self._line else None

    def close(self) -> None:
        """Carry out what was issued, then end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
