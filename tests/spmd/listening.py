"""What is logged, for the tests that ask; pytest's own way costs every test of every rank a twentieth of its time."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

__all__ = ["heard"]


class _Listener(logging.Handler):
    def __init__(self, said: list[str]) -> None:
        super().__init__()
        self._said = said

    def emit(self, record: logging.LogRecord) -> None:
        self._said.append(record.getMessage())


@contextlib.contextmanager
def heard(level: int) -> Iterator[list[str]]:
    """The messages of the logger `dear` from `level` up, while it lasts."""
    said: list[str] = []
    listener, logger = _Listener(said), logging.getLogger("dear")
    before = logger.level
    logger.addHandler(listener)
    logger.setLevel(level)
    try:
        yield said
    finally:
        logger.removeHandler(listener)
        logger.setLevel(before)
