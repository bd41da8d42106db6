"""Listens for SIGUSR1, by which schedulers ask a job to stop after its next commit."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Iterator
from types import FrameType

__all__ = ["heeded", "received"]

log = logging.getLogger("dear")

_asked = threading.Event()


def received() -> bool:
    """Whether this process was asked to stop, inside :func:`heeded`."""
    return _asked.is_set()


def _ask(_number: int, _frame: FrameType | None) -> None:
    _asked.set()


@contextlib.contextmanager
def heeded() -> Iterator[None]:
    """A context in which this process listens for the signal.

    A handler that the script installed stays, and only the main thread can install one.
    """
    _asked.clear()
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGUSR1) != signal.SIG_DFL:
        log.debug("SIGUSR1 is not heeded: this is not the main thread, or the script has a handler of its own")
        yield
        return
    signal.signal(signal.SIGUSR1, _ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
