"""What the watchdog looks at: whatever ranks wait in."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from overlap.deadlock import Line

__all__ = ["Awaited", "Names", "Watched"]


class Watched(Protocol):
    """A communicator, or whatever else ranks wait in."""

    def pending(self) -> Sequence[Awaited]:
        """What is not finished."""

    def lines(self) -> Mapping[str, Line]:
        """How far this rank has come on its communicators."""


class Names(Watched, Protocol):
    """Where ranks ask for operations by name: see `overlap.horovod.runtime.Runtime`."""

    def asked_by_others(self) -> Sequence[Awaited]: ...
    @property
    def asked(self) -> int: ...
    @property
    def undecided(self) -> int: ...
    @property
    def threads(self) -> Collection[int]: ...
    def waits_for_a_decision(self, thread: int) -> bool: ...
    def give_up(self, reason: str) -> None: ...


class Awaited(Protocol):
    """One thing that is not finished; a `Work` is one."""

    @property
    def seconds(self) -> float:
        """For how long it has not been."""

    def describe(self) -> str:
        """What it is, in one line."""
