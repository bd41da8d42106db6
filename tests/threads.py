"""Which threads of this process the kernel still has, by their names."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

__all__ = ["wait_for_no_thread_named"]

_SECONDS = 10.0  # who joins a thread may go on before the kernel has taken it off its list


def wait_for_no_thread_named(word: str) -> None:
    """Raise ``AssertionError`` if threads with `word` in their names do not end."""
    deadline = time.monotonic() + _SECONDS
    while left := [name for name in _names() if word in name]:
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


def _names() -> list[str]:
    names = []
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            names.append((thread / "comm").read_text().strip())
    return names
