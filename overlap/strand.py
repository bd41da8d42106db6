"""One thread that carries out a communicator's operations in the order in which they were issued."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

import comm_core
from comm_core import TransportError

__all__ = ["PendingWork", "Strand"]


class PendingWork:
    """An issued operation: what `overlap.communicator.Work` promises."""

    def __init__(self, kind: str, label: str, rank: int, size: int, nbytes: int) -> None:
        self.label = label or kind
        self._what = f"{kind} {label!r}" if label else kind
        self._where = f"rank {rank} of {size}, {nbytes} bytes"
        self._issued = time.monotonic()
        self._ended: float | None = None
        self._error: BaseException | None = None
        self._finished = threading.Event()

    @property
    def seconds(self) -> float:
        return (time.monotonic() if self._ended is None else self._ended) - self._issued

    def wait(self, timeout: float | None = None) -> None:
        if not self._finished.wait(timeout):
            raise comm_core.TimeoutError(f"{self.describe()} was not done within {timeout:g} s")
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        return self._finished.is_set()

    def exception(self) -> comm_core.Error | None:
        return self._error if isinstance(self._error, comm_core.Error) else None

    def order_before(self, stream: int) -> None:
        self.wait()

    def describe(self) -> str:
        state = "running" if not self.done() else "failed" if self._error else "done"
        return f"{self._what} ({self._where}, {state}, {self.seconds:.1f} s)"

    def finish(self, error: BaseException | None = None) -> None:
        if error is not None and not isinstance(error, comm_core.Error):
            error = TransportError(f"{self._what} ({self._where}): {error}")
        elif error is not None and self._what not in str(error):
            error = type(error)(f"{self._what} ({self._where}): {error}")
        self._error = error
        self._ended = time.monotonic()
        self._finished.set()


class Strand:
    """Runs tasks one after the other on a daemon thread, started with the first one.

    After a task failed the peers are out of step, so every later one fails at once with the first error.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: queue.SimpleQueue[tuple[PendingWork, Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._unfinished: dict[PendingWork, None] = {}
        self._closed = False

    def submit(self, work: PendingWork, task: Callable[[], None]) -> PendingWork:
        if self._closed:
            raise comm_core.InvalidUsage(f"{self._name}: the communicator is closed")
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._unfinished[work] = None
        self._tasks.put((work, task))
        return work

    def pending(self) -> list[PendingWork]:
        return [work for work in list(self._unfinished) if not work.done()]

    def _run(self) -> None:
        while (item := self._tasks.get()) is not None:
            work, task = item
            error = self._failure
            if error is None:
                try:
                    task()
                except BaseException as raised:  # it belongs to whoever waits for the work
                    self._failure = error = raised
            del item, task  # the task keeps the caller's tensors alive, and only until here
            self._unfinished.pop(work, None)
            work.finish(error)

    def close(self) -> None:
        """Carry out what was issued, then end the thread."""
        self._closed = True
        if self._thread is not None and self._thread is not threading.current_thread():
            self._tasks.put(None)
            self._thread.join()
