"""Handles forked children, which have their parent's objects and connections, but none of its threads.

[Note: before a fork] What is on its way to a process never comes to its children. So whoever has something on its way waits
for it first, and children have final values.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol

import comm_core

__all__ = ["Origin", "Settles", "settle_before_forks"]


class Origin:
    """The process that an object was made in, and that alone may use it to communicate."""

    __slots__ = ("_process",)

    def __init__(self) -> None:
        self._process = os.getpid()

    @property
    def elsewhere(self) -> bool:
        """Whether this process is a forked child of that one."""
        return os.getpid() != self._process

    def require(self) -> None:
        """Raise ``comm_core.Error`` in a forked child: what it sent would be taken for its parent's."""
        if self.elsewhere:
            raise comm_core.Error(
                "dear cannot be used in a forked child: the threads and the connections to other ranks are its parent's; "
                "call dear in the parent only"
            )


class Settles(Protocol):
    """An object that may have values in flight."""

    def settle(self) -> None:
        """Wait for the values. In the process that it was made in; on whatever thread forks."""


_settling: weakref.WeakSet[Settles] = weakref.WeakSet()


def settle_before_forks(one: Settles) -> None:
    """Settle `one` before this process forks, as long as it lives: [Note: before a fork]. As long as `one` lives."""
    _settling.add(one)


def _settle_all() -> None:
    for one in list(_settling):
        one.settle()


os.register_at_fork(before=_settle_all)
