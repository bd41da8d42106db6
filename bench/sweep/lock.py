"""One sweep at a time in a folder of results."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["Occupied", "alone"]


class Occupied(RuntimeError):
    """Another sweep works in the folder."""


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Holds `folder` while the context lasts; raises :class:`Occupied` where somebody else does.

    The kernel ends the lock with the last process that holds it: this one, and a run that was forked from it.
    """
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Occupied(f"another sweep is running in {folder}; wait for it, or choose another --output") from None
        yield
