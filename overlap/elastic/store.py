"""Stores commits on disk, each complete or absent, whatever happens while it is written. Knows nothing of ranks."""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import os
import re
import sys
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from overlap.elastic import lock

__all__ = ["DIRECTORY_VARIABLE", "CommitError", "CommitStore", "default_directory", "store_at"]

log = logging.getLogger("dear")

DIRECTORY_VARIABLE = "DEAR_ELASTIC_DIR"
_KEPT = 2  # the newest, and the one before it should the newest be unreadable
_NAME = re.compile(r"commit-(\d{8})\.pt")
_CHECKSUM = "dear-crc32 {:08x}"  # behind what torch.save() writes, where torch.load() does not look
_CHECKSUM_BYTES = len(_CHECKSUM.format(0))
_CHUNK = 1 << 20


class CommitError(RuntimeError):
    """A commit could not be written, or none of those that are there could be read."""


def default_directory(environ: Mapping[str, str], argv: Sequence[str]) -> Path:
    """``DEAR_ELASTIC_DIR``, else ``.dear-elastic/SCRIPT-HASH`` below the working directory (pure).

    The hash is that of the script's arguments: other arguments are another job, which must not continue this one.
    """
    chosen = environ.get(DIRECTORY_VARIABLE)
    if chosen:
        return Path(chosen)
    digest = hashlib.sha256("\0".join(argv).encode()).hexdigest()[:8]
    return Path(".dear-elastic") / f"{Path(argv[0]).stem or 'python'}-{digest}"


class CommitStore:
    """Numbered snapshots in one directory, of which the newest two are kept, not counting any found unreadable."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._unreadable: set[int] = set()  # numbers of commits that newest() found damaged

    def _numbers(self) -> list[int]:
        """Of the commits that are there, newest first."""
        if not self.directory.is_dir():
            return []
        found = (_NAME.fullmatch(path.name) for path in self.directory.iterdir())
        return sorted((int(match.group(1)) for match in found if match), reverse=True)

    def _path(self, number: int) -> Path:
        return self.directory / f"commit-{number:08d}.pt"

    def claim(self) -> None:
        """Lock the directory against other jobs, which would remove this one's commits.

        Raises :class:`CommitError` if one is here.
        """
        try:
            lock.take(self.directory)
        except (lock.Occupied, OSError) as error:
            raise CommitError(f"no commit can be made: {error}") from error

    def write(self, snapshot: Any) -> int:
        """Write a commit (nested dicts, lists, tensors and picklable objects); returns its number.

        Raises :class:`CommitError`.

        The name appears once the contents are on the disk, so a commit that has a name is complete. What becomes of it
        there is told by a checksum.
        """
        self.claim()
        numbers = self._numbers()
        number = numbers[0] + 1 if numbers else 1
        path = self._path(number)
        partial = path.with_suffix(".partial")
        try:
            with _Summed(io.FileIO(partial, "w")) as file:
                torch.save(snapshot, file)
                file.write(_CHECKSUM.format(file.checksum).encode())
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
            self._sync_directory()
        except Exception as error:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise CommitError(f"commit {number} could not be written to {self.directory}: {_origin(error)}") from error
        readable = [before for before in numbers if before not in self._unreadable]
        for old in set(numbers).difference(readable[: _KEPT - 1]):
            self._path(old).unlink(missing_ok=True)
        return number

    def _sync_directory(self) -> None:
        folder = os.open(self.directory, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def newest(self) -> tuple[int, Any] | None:
        """The newest commit that can be read and its number; None where there is none.

        Reads pickles: the directory is trusted as much as the script. Raises :class:`CommitError` where there are
        commits and none is readable.
        """
        failures = []
        for number in self._numbers():
            try:
                _verify(self._path(number))
                snapshot = torch.load(self._path(number), map_location="cpu", weights_only=False)
            except Exception as error:  # a damaged file fails in many ways
                self._unreadable.add(number)  # it must not be kept in place of an older one
                failures.append(f"{self._path(number).name}: {error}")
                log.warning("commit %d in %s cannot be read: %s", number, self.directory, error)
            else:
                self._unreadable.discard(number)
                return number, snapshot
        if failures:
            raise CommitError(f"none of the commits in {self.directory} can be read ({'; '.join(failures)})")
        return None

    def clear(self) -> None:
        """Remove all commits, since the job is finished: the next one begins at the beginning."""
        for number in self._numbers():
            self._path(number).unlink(missing_ok=True)
        for partial in self.directory.glob("commit-*.partial"):
            partial.unlink(missing_ok=True)
        lock.release(self.directory)
        with contextlib.suppress(OSError):  # not ours alone, or not there
            self.directory.rmdir()


class _Summed(io.BufferedWriter):
    """A file that knows the checksum of what was written to it."""

    checksum = 0

    def write(self, data: Any) -> int:
        self.checksum = zlib.crc32(data, self.checksum)
        return super().write(data)


def _verify(path: Path) -> None:
    """Raises ``ValueError`` for a file that is no commit, or has changed since it was written."""
    with path.open("rb") as file:
        left, found = os.fstat(file.fileno()).st_size - _CHECKSUM_BYTES, 0
        while left > 0 and (chunk := file.read(min(left, _CHUNK))):
            found = zlib.crc32(chunk, found)
            left -= len(chunk)
        written = file.read().decode(errors="replace")
    if not re.fullmatch(_CHECKSUM.format(0)[:-8] + "[0-9a-f]{8}", written):
        raise ValueError("it is no commit: it does not end with a commit's checksum")
    if written != _CHECKSUM.format(found):
        raise ValueError(f"its contents have changed: it ends with {written}, and they have {found:08x}")


def _origin(error: BaseException) -> BaseException:
    """The error of the operating system that led to `error`, if one did: torch fails again while it closes the file."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return cause or error


def store_at(chosen: str | os.PathLike[str] | None) -> CommitStore:
    """The store in `chosen`, or by default that of this process; wherever the script goes with ``os.chdir()`` later.

    The second by default has its commits in ``2`` below it, and so on, in the order in which the process makes them: the
    next process finds each again by that, whatever was dropped, finished or never committed in between.
    """
    if chosen is not None:
        return CommitStore(Path(chosen).absolute())
    base = default_directory(os.environ, sys.argv).absolute()
    _made[base] += 1
    return CommitStore(base if _made[base] == 1 else base / str(_made[base]))


# By default, in each directory. Of the process and not of a session: shutdown() and init() begin no other order.
_made: Counter[Path] = Counter()
