"""Numbers for operations under way: what the ``_async`` functions return."""

from __future__ import annotations

import itertools
import threading
from typing import Any

from overlap.horovod.controller.pending import Pending

__all__ = ["Handles"]

_numbers = itertools.count()  # of all sessions of the process: a script may still have handles of the one before


class Handles:
    """Each number is given out once and waited for once, from any thread."""

    def __init__(self) -> None:
        self._waiting: dict[int, Pending] = {}
        self._given = range(0)  # while a session lasts, nobody else gives any
        self._lock = threading.Lock()

    def give(self, pending: Pending) -> int:
        """A number for :meth:`wait` and :meth:`done`."""
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
