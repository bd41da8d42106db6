"""A time limit for what a process does before or after ranks can ask each other: by its own clock alone."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from types import TracebackType

__all__ = ["Limit"]

log = logging.getLogger("dear")


class Limit:
    """A context that warns after `warn_after` seconds, and ends the process by `abort` after `abort_after`; 0: never.

    `what` says what that is, and who is missing, as far as it is known then.

    The thread that does it may be blocked below Python, as in ``MPI_Init``: no exception would reach it.
    """

    def __init__(
        self,
        what: Callable[[], str],
        *,
        warn_after: float,
        abort_after: float,
        abort: Callable[[int], object] = os._exit,
    ) -> None:
        self._what, self._warn_after, self._abort_after, self._abort = what, warn_after, abort_after, abort
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dear-limit", daemon=True)

    def __enter__(self) -> Limit:
        if self._warn_after or self._abort_after:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()

    def _run(self) -> None:
        waited = 0.0
        if self._warn_after and not 0 < self._abort_after <= self._warn_after:
            waited = self._warn_after
            if self._over.wait(waited):
                return
            log.warning("%s, for %g s", self._what(), waited)
        if self._abort_after and not self._over.wait(self._abort_after - waited):
            limit = self._abort_after
            log.error("%s, for %g s (DEAR_STALL_ABORT_SECONDS); this process ends", self._what(), limit)
            self._abort(1)
