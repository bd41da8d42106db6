"""What collectives by name raise."""

from __future__ import annotations

import comm_core

__all__ = ["HorovodInternalError", "Mismatch", "NotInitialized"]


class HorovodInternalError(comm_core.Error):
    """A collective failed or will never happen: ranks disagree, a rank has left, a connection was lost."""


class Mismatch(HorovodInternalError, comm_core.InvalidUsage):
    """The ranks asked for different things under one name. Nothing was sent; everything else goes on."""


class NotInitialized(ValueError, RuntimeError):
    """``init()`` was not called, or ``shutdown()`` was."""
