"""One failing rank ends the job, with its own traceback, at once."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from types import TracebackType

__all__ = ["install", "remove"]

_previous: Callable[..., object] | None = None


def install(rank: int, size: int, abort: Callable[[int], None]) -> None:
    """From now on an uncaught exception prints its traceback and aborts the whole job.

    Without it the interpreter would wait at exit for peers which wait in a collective for this rank.
    """
    global _previous
    if size == 1 or _previous is not None:
        return
    _previous = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        text = "".join(traceback.format_exception(kind, error, trace))
        sys.stderr.write(f"rank {rank} of {size} failed:\n{text}")
        sys.stderr.flush()
        sys.stdout.flush()
        abort(1)

    sys.excepthook = report


def remove() -> None:
    """Put the previous exception hook back."""
    global _previous
    if _previous is not None:
        sys.excepthook = _previous
        _previous = None
