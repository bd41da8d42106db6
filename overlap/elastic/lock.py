"""A lock that admits one job at a time to a directory of commits, also where hosts share it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket
from pathlib import Path

__all__ = ["Occupied", "release", "take"]

log = logging.getLogger("dear")

_NAME = "lock"
_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
# Open files, by process (a forked child holds none of them) and directory, by whatever name: to close any file of a lock
# gives that lock up, also where another one is open.
_held: dict[tuple[int, Path], int] = {}


class Occupied(RuntimeError):
    """Another job commits into this directory."""


def take(directory: Path) -> None:
    """Lock `directory`, which is made if need be, for this process, until :func:`release` or its end, however it ends.

    A record lock (`fcntl`): what forks of this process inherit is not the lock, and NFS hands it on to its server. Raises
    :class:`Occupied` where another process has it. Where the file system has no locks, a warning says so.
    """
    path = directory / _NAME
    mine = _held.get(_key(directory))
    if mine is not None and _is_still(mine, path):
        return
    release(directory)
    directory.mkdir(parents=True, exist_ok=True)
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_still(file, path):  # its owner has removed it meanwhile, and somebody may have made another one
                os.close(file)
                continue
            os.ftruncate(file, 0)
            os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                owner = os.pread(file, 1000, 0).decode(errors="replace") or "another process"
                os.close(file)
                raise Occupied(
                    f"{directory} is in use by {owner}, a job that commits into it: end that job, or give this one a "
                    "directory of its own (DEAR_ELASTIC_DIR)"
                ) from None
            os.close(file)
            if error.errno not in _UNSUPPORTED:
                raise
            log.warning("%s cannot be locked (%s): see to it that no other job commits into it", directory, error)
            return
        _held[_key(directory)] = file
        return


def _key(directory: Path) -> tuple[int, Path]:
    return os.getpid(), directory.resolve()


def _is_still(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def release(directory: Path) -> None:
    """Give the lock back, and remove its file, if this process has it."""
    file = _held.pop(_key(directory), None)
    if file is None:
        return
    if _is_still(file, directory / _NAME):
        with contextlib.suppress(OSError):
            (directory / _NAME).unlink()
    os.close(file)
