"""Forked children: they have their parent's objects, and its connections, but none of its threads."""

from __future__ import annotations

import os

import comm_core

__all__ = ["Origin"]


class Origin:
    """The process that an object was made in, the only one that may use it for what others take part in."""

    __slots__ = ("_process",)

    def __init__(self) -> None:
        self._process = os.getpid()

    @property
    def elsewhere(self) -> bool:
        """Whether this is a forked child of it."""
        return os.getpid() != self._process

    def require(self) -> None:
        """Raise ``comm_core.Error`` in a forked child: what it sent would be taken for its parent's."""
        if self.elsewhere:
            raise comm_core.Error(
                "dear cannot be used in a forked child: the threads and the connections to other ranks are its parent's"
            )
