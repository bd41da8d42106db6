"""Errors that collectives by name raise."""

from __future__ import annotations

import comm_core
from overlap.job import session

__all__ = ["HorovodInternalError", "Mismatch", "NotInitialized"]


class HorovodInternalError(comm_core.Error):
    """A collective failed or will never happen: ranks disagree, a rank has left, a connection was lost."""


class Mismatch(HorovodInternalError, comm_core.InvalidUsage):
    """The ranks asked for different things under one name, or for a process set that cannot be: a ``ValueError`` too.

    Nothing was sent; everything else goes on.
    """


class NotInitialized(HorovodInternalError, session.NotInitialized):
    """The session has not begun, or has ended: ``init()`` was not called, or ``shutdown()`` was.

    Horovod's functions that ask for a rank or a size raise ``ValueError`` then, its collectives ``HorovodInternalError``.
    """
