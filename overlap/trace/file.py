"""A Chrome trace on disk, which is complete JSON after every write, whatever happens to the process next."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

__all__ = ["TimelineError", "TraceFile", "obstacle"]

_END = b"\n]\n"
_PIECE = 2**14  # bytes: a larger write may be cut where the process is killed meanwhile
_LAST_WORDS = 1000  # bytes kept free for events that say why the file ends


def obstacle(path: str) -> str | None:
    """The reason why a timeline cannot be written to `path`, as far as that is known before; else None."""
    folder = os.path.dirname(path)
    if not folder or os.path.isdir(folder):
        return None
    return f"the timeline {path} cannot be written: there is no folder {folder}; make it, or name another one"


class TimelineError(OSError):
    """The file of a timeline cannot be made."""


class TraceFile:
    """A JSON array of trace events. Writes overwrite the array's end and put it back in the same call.

    Args:
        path: file to make or to replace.
        max_bytes: the file never gets larger.

    Raises :class:`TimelineError` where the file cannot be made, and ``OSError`` where it cannot be written.
    """

    def __init__(self, path: str, max_bytes: int) -> None:
        self.path, self._max_bytes = path, max_bytes
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        except OSError as error:
            raise TimelineError(obstacle(path) or f"the timeline {path} cannot be written: {error.strerror}") from error
        self._empty = True
        self._end = 1
        os.pwrite(self._file, b"[" + _END, 0)

    def append(self, events: Sequence[dict[str, Any]], *, last_words: bool = False) -> bool:
        """Write as many of `events` as fit. False if not all did: the file is full.

        `last_words` may use the space that is kept free for them.
        """
        limit = self._max_bytes - (0 if last_words else _LAST_WORDS)
        fitting: list[bytes] = []
        room, piece = limit - self._end - len(_END), 0
        for event in events:
            line = b"\n" + json.dumps(event, separators=(",", ":")).encode()
            room -= len(line) + 1
            if room < 0:
                self._add(fitting)
                return False
            fitting.append(line)
            piece += len(line)
            if piece >= _PIECE:
                self._add(fitting)
                piece = 0
        self._add(fitting)
        return True

    def _add(self, lines: list[bytes]) -> None:
        """Write `lines`, and empty the list."""
        if lines:
            text = (b"" if self._empty else b",") + b",".join(lines)
            self._write(text + _END)
            self._end += len(text)
            self._empty = False
            lines.clear()

    def _write(self, data: bytes) -> None:
        written = os.pwrite(self._file, data, self._end)
        if written < len(data):  # the disk is full: leave the array as it was
            os.pwrite(self._file, _END, self._end)
            os.ftruncate(self._file, self._end + len(_END))
            raise OSError(f"{self.path}: wrote {written} of {len(data)} bytes")

    def close(self) -> None:
        os.close(self._file)
