"""Groups of ranks that a communicator may know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from overlap.transport.communicator import Communicator

__all__ = ["Levels"]


@dataclass(frozen=True, slots=True)
class Levels:
    """Groups of ranks that a communicator knows: see :meth:`.Communicator.two_level` and :meth:`.Communicator.hybrid`."""

    kind: Literal["two_level", "hybrid"]
    groups: tuple[tuple[int, ...], ...]

    def over(self, comm: Communicator) -> Communicator:
        """A communicator of the ranks of `comm` that knows these groups. On every rank of it."""
        return comm.two_level(self.groups) if self.kind == "two_level" else comm.hybrid(self.groups)
