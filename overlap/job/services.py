"""Interfaces of what a session runs beside training, and asks to end with it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

__all__ = ["Issuer", "Participant", "Service"]


class Service(Protocol):
    """Something that runs beside training."""

    def close(self) -> None:
        """End the service. On every rank, in the same order among services."""

    def interrupt(self) -> None:
        """Raise an error wherever somebody here waits for other ranks, since some are lost. On any rank and thread."""

    def abandon(self) -> None:
        """End the service on this rank, after :meth:`interrupt`."""


class Issuer(Protocol):
    """A service whose threads issue what optimizers hand to it."""

    def close(self, given_up: Collection[str]) -> None:
        """Take nothing more, and issue what was handed in, as all ranks do.

        On every rank. Nothing goes to communicators that are `given_up`, by name. Afterwards they count what was
        issued.
        """

    def join(self) -> None:
        """Wait for its threads, now that nothing is under way any more."""


class Participant(Protocol):
    """A service that other ranks wait for in every step, and would wait for in vain on a rank that is out of data."""

    def join(self) -> None:
        """Take part, contributing nothing, until no rank needs it any more."""

    def forget(self, topic: str) -> None:
        """Forget the optimizer of this name, which all ranks have dropped."""
