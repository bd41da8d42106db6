"""How a benchmark ends when it is told to: in order, so that its emulated hosts and its workers are removed."""

from __future__ import annotations

import signal
import sys

__all__ = ["end_in_order"]


def end_in_order() -> None:
    """From now on SIGTERM, and SIGHUP as a terminal sends when it is closed, raise ``SystemExit``. Of the main thread.

    A program started by nohup goes on ignoring SIGHUP.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda received, _frame: sys.exit(128 + received))
