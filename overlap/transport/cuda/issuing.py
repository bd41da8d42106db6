"""Issues operations of the host on copies of a device's tensors, as soon as the device has made the copies.

    hooks    copy ─▶ handed in     copy ─▶ handed in    …             goes on at once
    thread           waits for the copy ─▶ issues it ─▶ waits for the next copy …

Operations are issued in the order in which they were handed in, which is the same on all ranks. Whoever issues others on
the same communicator waits first until nothing is left (:meth:`Issuer.settle`).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence

import comm_core
from overlap.transport.checks import check_timeout
from overlap.transport.communicator import Communicator, Start
from overlap.transport.cuda.work import Moment
from overlap.transport.work import Work

__all__ = ["Issuer", "LaterWork"]

_JOIN_SECONDS = 5.0
_OVER = "the communicator was closed"


class LaterWork:
    """An operation that is issued once the device has passed `copied`."""

    def __init__(self, title: tuple[str, str, int], copied: Moment, start: Start, changed: threading.Condition) -> None:
        self.op, self.label, self.nbytes = title
        self.copied, self.start = copied, start
        self._changed = changed
        self._work: Work | None = None
        self._failure: BaseException | None = None
        self._begun, self._issued = time.monotonic(), 0.0

    def settle(self, made: Work | BaseException) -> None:
        """What became of it: the issued operation, or why there is none. Under the lock."""
        if isinstance(made, BaseException):
            self._failure = made
        else:
            self._work, self._issued = made, time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begun if self._work is None else self._work.seconds

    @property
    def operations(self) -> Sequence[tuple[float, Work]]:
        """See :func:`overlap.transport.work.operations`."""
        return [] if self._work is None else [(self._issued, self._work)]

    def wait(self, timeout: float | None = None) -> None:
        limit = check_timeout("wait", timeout)
        until = None if limit is None else time.monotonic() + limit
        with self._changed:
            over = self._changed.wait_for(lambda: self._work is not None or self._failure is not None, limit)
        if not over:
            raise comm_core.TimeoutError(f"{self.describe()} was not done in time")
        if self._work is None:
            raise comm_core.TransportError(f"{self.describe()}: {self._failure}") from self._failure
        self._work.wait(None if until is None else max(0.0, until - time.monotonic()))

    def done(self) -> bool:
        return self._failure is not None or (self._work is not None and self._work.done())

    def exception(self) -> comm_core.Error | None:
        if self._failure is not None:
            return comm_core.TransportError(f"{self.describe()}: {self._failure}")
        return None if self._work is None else self._work.exception()

    def order_before(self, stream: int) -> None:
        self.wait()

    def describe(self) -> str:
        if self._work is not None:
            return self._work.describe()
        return f"{self.op} {self.label!r} ({self.nbytes} bytes, not issued: the device has not computed what it sends)"


class Issuer:
    """Issues operations of `host`, each once a device has passed a moment; its thread begins with the first that waits.

    :meth:`close` ends it.
    """

    def __init__(self, host: Communicator) -> None:
        self._host = host
        self._changed = threading.Condition()
        self._queue: deque[LaterWork] = deque()
        self._thread: threading.Thread | None = None
        self._closed: str = ""

    def issue(self, copied: Moment | None, start: Start, title: tuple[str, str, int]) -> Work:
        """Issue `start` after all that was handed in before, and after `copied` (None: it is past).

        `title`: kind, label, bytes.
        """
        with self._changed:
            if not self._queue and (copied is None or copied.done()):
                return start()
            if self._closed:
                raise comm_core.InvalidUsage(f"{title[0]} {title[1]!r}: {self._closed}")
            work = LaterWork(title, copied or _Past(), start, self._changed)
            self._queue.append(work)
            self._host.promised = self._host.committed + 1  # who ends the session must know of it before it is issued
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="dear-staged", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return work

    def settle(self) -> None:
        """Block until all that was handed in is issued."""
        if self._queue:
            with self._changed:
                self._changed.wait_for(lambda: not self._queue)

    def pending(self) -> list[Work]:
        """What is not issued yet."""
        with self._changed:
            return list(self._queue)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closed)
                if not self._queue:
                    return
                work = self._queue[0]
            made: Work | BaseException
            try:
                work.copied.wait()
                made = work.start()
            except BaseException as error:
                made = error
            with self._changed:
                if self._queue and self._queue[0] is work:  # not given up meanwhile
                    self._queue.popleft()
                    work.settle(made)
                if isinstance(made, BaseException):
                    self._host.promised = self._host.issued + len(self._queue)
                self._changed.notify_all()

    def close(self) -> None:
        """Issue what was handed in, and take nothing more. Waits some seconds for a device that does not come."""
        self._end(_OVER)
        if self._thread is not None:
            self._thread.join(_JOIN_SECONDS)

    def abandon(self) -> None:
        """End, with an error, what is not issued yet."""
        self._end("its communicator was abandoned")
        with self._changed:
            for work in self._queue:
                work.settle(comm_core.TransportError("it was given up"))
            self._queue.clear()
            self._host.promised = self._host.issued
            self._changed.notify_all()

    def _end(self, reason: str) -> None:
        with self._changed:
            self._closed = self._closed or reason
            self._changed.notify_all()


class _Past:
    """A moment that is over."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def order_before(self, stream: int) -> None:
        pass
