"""Groups of ranks that a communicator may know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from overlap.transport.communicator import Communicator

__all__ = ["Levels"]


@dataclass(frozen=True, slots=True)
class Levels:
    """Groups of ranks that a communicator knows: see :meth:`.Communicator.two_level` and :meth:`.Communicator.hybrid`.

    With an `order`, ranks have other numbers there: ``order[i]`` is number i, and `groups`, if any, are of these numbers.
    """

    kind: Literal["two_level", "hybrid"]
    groups: tuple[tuple[int, ...], ...]
    order: tuple[int, ...] = ()

    def over(self, comm: Communicator) -> Communicator:
        """A communicator of the ranks of `comm` that knows these groups. On every rank of it."""
        if self.order:
            ordered = comm.split(0, self.order.index(comm.rank))
            assert ordered is not None, "every rank has the same colour"
            comm = ordered
        if not self.groups:
            return comm
        return comm.two_level(self.groups) if self.kind == "two_level" else comm.hybrid(self.groups)
