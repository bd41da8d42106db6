"""One rank's part in an operation: its caller prepares it, and all ranks start it at the same place in the order.

caller's thread   prepare ── enqueue ························ wait ── result
runtime's thread                  response ── start (collectives)

`Operation` is what the rank brings and takes away, `Pending` how far it has come, `Handles` the numbers that scripts have.
"""

from __future__ import annotations

import itertools
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import comm_core
from overlap.horovod.controller.errors import HorovodInternalError
from overlap.horovod.controller.request import Request, Response
from overlap.transport.communicator import Communicator, Work

__all__ = ["Group", "Handles", "Nothing", "Only", "Operation", "Pending"]

_numbers = itertools.count()  # of all sessions of the process: a script may still have handles of the one before


@dataclass(frozen=True, slots=True)
class Group:
    """A process set as this rank sees it; without a communicator where this rank is not in it."""

    number: int
    ranks: tuple[int, ...]
    comm: Communicator | None

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def index(self) -> int:
        """This rank's number within the set."""
        return self.members.rank

    @property
    def members(self) -> Communicator:
        """The communicator of the set; only its members are asked to use it."""
        assert self.comm is not None, "this rank is not in the process set"
        return self.comm


class Operation(ABC):
    """An operation on one rank: what it brings to the others, and what it takes away."""

    @abstractmethod
    def start(self, response: Response, group: Group) -> list[Work]:
        """Issue the collectives. Must not wait for them: others wait to be started behind it."""

    @abstractmethod
    def result(self) -> Any:
        """The result for the caller; asked once, when all collectives are done."""


class Nothing(Operation):
    """An operation that is over once every rank has asked for it: a barrier, a join, changes of process sets."""

    def __init__(self) -> None:
        self._number = -1

    def start(self, response: Response, group: Group) -> list[Work]:
        self._number = response.number
        return []

    def result(self) -> int:
        """The number in the response."""
        return self._number


class Only(Operation):
    """An operation on one tensor, whose result is not a list."""

    def __init__(self, operation: Operation) -> None:
        self._operation = operation

    def start(self, response: Response, group: Group) -> list[Work]:
        return self._operation.start(response, group)

    def result(self) -> Any:
        (only,) = self._operation.result()
        return only


class Pending:
    """The operation behind a handle.

    The runtime's thread calls `issued` or `fail`, once; the caller `done` and `wait`.
    """

    def __init__(self, request: Request, operation: Operation) -> None:
        self.request, self.operation = request, operation
        self._since = time.monotonic()
        self._decided = threading.Event()
        self._works: Sequence[Work] = ()
        self._error: Exception | None = None
        self._waiter: int | None = None

    def issued(self, works: Sequence[Work]) -> None:
        """Note that its collectives are under way."""
        self._works = works
        self._decided.set()

    def fail(self, error: Exception) -> None:
        """Fail the operation, unless it has been issued already."""
        if not self._decided.is_set():
            self._error = error
            self._decided.set()

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._decided.is_set() and all(work.done() for work in self._works)

    def settled(self) -> None:
        """Wait until it is known whether the operation happens."""
        self._decided.wait()

    def wait(self) -> Any:
        """Wait for the operation's result.

        Raises what went wrong, connections lost as :class:`HorovodInternalError`.
        """
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
        """The thread that waits, or has waited, for the operation to be decided."""
        return self._waiter

    @property
    def seconds(self) -> float:
        """The seconds since it was asked for."""
        return time.monotonic() - self._since

    def describe(self) -> str:
        running = [work.describe() for work in self._works if not work.done()]
        state = f"in {running[0]}" if running else "asked for, and not by all ranks yet"
        return f"{self.request.title} ({state})"


class Handles:
    """The handles of operations; each is given out once and waited for once, from any thread."""

    def __init__(self) -> None:
        self._waiting: dict[int, Pending] = {}
        self._given = range(0)  # while a session lasts, nobody else gives any
        self._lock = threading.Lock()

    def give(self, pending: Pending) -> int:
        """A handle, for :meth:`wait` and :meth:`done`."""
        with self._lock:
            number = next(_numbers)
            self._waiting[number] = pending
            self._given = range(self._given.start if self._given else number, number + 1)
            return number

    def done(self, handle: int) -> bool:
        """Whether :meth:`wait` would return at once. Raises ``ValueError`` for a handle that is none (any more)."""
        found = self._waiting.get(handle)
        if found is None:
            raise ValueError(f"handle {handle} was never given out, or synchronize() has had it already")
        return found.done()

    def wait(self, handle: int) -> Any:
        """The result; None for a handle that was waited for before, as in Horovod.

        Raises ``ValueError`` for a handle that is none, or one of a session that was shut down.
        """
        with self._lock:
            found = self._waiting.pop(handle, None)
            if found is None and not (isinstance(handle, int) and handle in self._given):
                raise ValueError(f"handle {handle!r} was never given out since init()")
        return None if found is None else found.wait()
