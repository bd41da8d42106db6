"""Numbers for operations under way: what the ``_async`` functions return."""

from __future__ import annotations

import threading
from typing import Any

from overlap.horovod.pending import Pending

__all__ = ["Handles"]


class Handles:
    """Each number is given out once and waited for once, from any thread."""

    def __init__(self) -> None:
        self._waiting: dict[int, Pending] = {}
        self._given = 0
        self._lock = threading.Lock()

    def give(self, pending: Pending) -> int:
        """A number for :meth:`wait` and :meth:`done`."""
        with self._lock:
            self._waiting[self._given] = pending
            self._given += 1
            return self._given - 1

    def done(self, handle: int) -> bool:
        """Whether :meth:`wait` would return at once. Raises ``ValueError`` for a handle that is none (any more)."""
        found = self._waiting.get(handle)
        if found is None:
            raise ValueError(f"handle {handle} was never given out, or synchronize() has had it already")
        return found.done()

    def wait(self, handle: int) -> Any:
        """The result; None for a handle that was waited for before, as in Horovod."""
        with self._lock:
            found = self._waiting.pop(handle, None)
            if found is None and not (isinstance(handle, int) and 0 <= handle < self._given):
                raise ValueError(f"handle {handle!r} was never given out")
        return None if found is None else found.wait()
