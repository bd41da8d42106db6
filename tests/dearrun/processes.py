"""What tests wait for: that something is true soon, and that processes have ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["runs", "wait_for"]


def runs(process: int) -> bool:
    """Not what has ended and was not waited for by its parent yet."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(true: Callable[[], bool]) -> None:
    """For two minutes at most: on a busy machine a start takes many seconds."""
    deadline = time.monotonic() + 120
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)
