"""An operation that this rank has asked for: waiting to be decided, under way, or done."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import comm_core
from overlap.horovod.controller.errors import HorovodInternalError
from overlap.horovod.controller.operation import Operation
from overlap.horovod.controller.request import Request
from overlap.transport.communicator import Work

__all__ = ["Pending"]


class Pending:
    """What a handle stands for. The facade's thread calls `issued` or `fail`, once; the caller `done` and `wait`."""

    def __init__(self, request: Request, operation: Operation) -> None:
        self.request, self.operation = request, operation
        self._since = time.monotonic()
        self._decided = threading.Event()
        self._works: Sequence[Work] = ()
        self._error: Exception | None = None
        self._waiter: int | None = None

    def issued(self, works: Sequence[Work]) -> None:
        """Its collectives are under way."""
        self._works = works
        self._decided.set()

    def fail(self, error: Exception) -> None:
        """It will not happen, unless it has been issued already."""
        if not self._decided.is_set():
            self._error = error
            self._decided.set()

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._decided.is_set() and all(work.done() for work in self._works)

    def settled(self) -> None:
        """Wait until it is known whether it happens."""
        self._decided.wait()

    def wait(self) -> Any:
        """The operation's result. Raises what went wrong, connections lost as :class:`HorovodInternalError`."""
        self._waiter = threading.get_ident()
        self._decided.wait()
        if self._error is not None:
            raise self._error
        for work in self._works:
            try:
                work.wait()
            except comm_core.Error as error:
                raise HorovodInternalError(f"{self.request.title}: {error}") from error
        return self.operation.result()

    # - What the watchdog looks at

    @property
    def waiter(self) -> int | None:
        """The thread that waits for it to be decided, or did."""
        return self._waiter

    @property
    def seconds(self) -> float:
        """Time since it was asked for."""
        return time.monotonic() - self._since

    def describe(self) -> str:
        running = [work.describe() for work in self._works if not work.done()]
        state = f"in {running[0]}" if running else "asked for, and not by all ranks yet"
        return f"{self.request.title} ({state})"
