"""Issues operations of the host on copies of a device's tensors, as soon as the device has made the copies.

    hooks    copy ─▶ handed in     copy ─▶ handed in    …             goes on at once
    thread           waits for the copy ─▶ issues it ─▶ waits for the next copy …

Operations are issued in the order in which they were handed in, which is the same on all ranks. Whoever issues others on
the same communicator waits first until nothing is left (:meth:`Issuer.flush`). After one that could not be issued none
is: it would meet the wrong one on other ranks.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import comm_core
from overlap.transport.checks import check_timeout
from overlap.transport.communicator import Communicator, Start
from overlap.transport.cuda.streams import Moment
from overlap.transport.work import Work

__all__ = ["Issuer", "LaterWork"]

_JOIN_SECONDS = 5.0


class LaterWork:
    """An operation that is issued once the device has passed `copied`."""

    def __init__(self, title: tuple[str, str, int], copied: Moment | None, changed: threading.Condition) -> None:
        self.op, self.label, self.nbytes = title
        self._copied, self._changed = copied, changed
        self._work: Work | None = None
        self._failure: BaseException | None = None
        self._begun, self._issued = time.monotonic(), 0.0

    def resolve(self, made: Work | BaseException) -> None:
        """What became of it: the issued operation, or why there is none. Under the lock."""
        self._copied = None
        if isinstance(made, BaseException):
            self._failure = made
        else:
            self._work, self._issued = made, time.perf_counter()

    @property
    def _resolved(self) -> bool:
        return self._work is not None or self._failure is not None

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begun if self._work is None else self._work.seconds

    @property
    def operations(self) -> Sequence[tuple[float, Work]]:
        """See :func:`overlap.transport.work.operations`."""
        return [] if self._work is None else [(self._issued, self._work)]

    def await_issue(self, limit: float | None = None) -> bool:
        """Block until it is issued, or cannot be, or `limit` seconds have passed; whether one of the first two is so."""
        copied = self._copied
        if limit is None and copied is not None:
            copied.wait()  # in torch, where the watchdog sees that a device computes; at a lock it would see a deadlock
        with self._changed:
            return self._changed.wait_for(lambda: self._resolved, limit)

    def wait(self, timeout: float | None = None) -> None:
        limit = check_timeout("wait", timeout)
        until = None if limit is None else time.monotonic() + limit
        if not self.await_issue(limit):
            raise comm_core.TimeoutError(f"{self.describe()} was not done in time")
        if self._failure is not None:
            raise self._failure
        assert self._work is not None
        self._work.wait(None if until is None else max(0.0, until - time.monotonic()))

    def done(self) -> bool:
        return self._failure is not None or (self._work is not None and self._work.done())

    def exception(self) -> comm_core.Error | None:
        if self._failure is None:
            return None if self._work is None else self._work.exception()
        return self._failure if isinstance(self._failure, comm_core.Error) else comm_core.Error(str(self._failure))

    def order_before(self, stream: int) -> None:
        self.wait()

    def describe(self) -> str:
        if self._work is not None:
            return self._work.describe()
        why = "" if self._failure is not None else ": the device has not computed what it sends"
        return f"{self.op} {self.label!r} ({self.nbytes} bytes, not issued{why})"


class _Entry(NamedTuple):
    work: LaterWork
    copied: Moment | None
    start: Start


class Issuer:
    """Issues operations of `host`, each once a device has passed a moment; its thread begins with the first that waits.

    The thread calls `bind` first, which makes the device its current one. :meth:`close` ends it.
    """

    def __init__(self, host: Communicator, bind: Callable[[], None]) -> None:
        self._host, self._bind = host, bind
        self._changed = threading.Condition()
        self._queue: deque[_Entry] = deque()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None  # why nothing is issued any more
        self._closed = False

    def issue(self, copied: Moment | None, start: Start, title: tuple[str, str, int]) -> Work:
        """Issue `start` after all that was handed in before, and after `copied` (None: it is past).

        `title`: kind, label, bytes.
        """
        with self._changed:
            if self._failure is not None:
                raise self._failure
            if not self._queue and (copied is None or copied.done()):
                return start()
            if self._closed:
                raise comm_core.InvalidUsage(f"{title[0]} {title[1]!r}: the communicator was closed")
            work = LaterWork(title, copied, self._changed)
            self._queue.append(_Entry(work, copied, start))
            self._host.promised = self._host.committed + 1  # who ends the session must know of it before it is issued
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="dear-staged", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return work

    def flush(self) -> None:
        """Block until all that was handed in is issued. Raises why something could not be."""
        with self._changed:
            last = self._queue[-1].work if self._queue else None
        if last is not None:
            last.await_issue()
        if self._failure is not None:
            raise self._failure

    def pending(self) -> list[Work]:
        """What is not issued yet."""
        with self._changed:
            return [entry.work for entry in self._queue]

    def _run(self) -> None:
        self._bind()
        while (first := self._next()) is not None:
            failure = None
            try:
                if first.copied is not None:
                    first.copied.wait()
            except BaseException as error:
                failure = error
            del first  # with its memory, while this thread waits for the next
            with self._changed:
                if self._queue:  # not given up meanwhile
                    self._issue_first(failure)
                self._changed.notify_all()

    def _next(self) -> _Entry | None:
        """The first in line; None where all is issued, and nothing more will be."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed)
            return self._queue[0] if self._queue else None

    def _issue_first(self, failure: BaseException | None) -> None:
        """Under the lock: whoever gives up finds it in line, or issued."""
        if failure is None:
            try:
                made = self._queue[0].start()
            except BaseException as error:
                failure = error
            else:
                self._queue.popleft().work.resolve(made)
        if failure is not None:
            self._fail(failure)

    def _fail(self, failure: BaseException) -> None:
        self._failure = failure
        for entry in self._queue:
            entry.work.resolve(failure)
        self._queue.clear()
        self._host.promised = self._host.issued
        self._changed.notify_all()

    def close(self) -> None:
        """Issue what was handed in, and take nothing more. What the device does not come to in some seconds is given up."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_JOIN_SECONDS)
            if self._thread.is_alive():
                self.abandon()

    def abandon(self) -> None:
        """End, with an error, what is not issued yet, and take nothing more."""
        with self._changed:
            self._closed = True
            if self._failure is None:
                self._fail(comm_core.TransportError("given up: the communicator is closed, and it had not been issued"))
