"""One rank's part in an operation: prepared by its caller, started by everybody at the same place in the order.

caller's thread   prepare ── ask ···························· wait ── result
facade's thread                   response ── start (collectives)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from overlap.horovod.controller.request import Response
from overlap.transport.communicator import Communicator, Work

__all__ = ["Group", "Nothing", "Only", "Operation"]


@dataclass(frozen=True, slots=True)
class Group:
    """A process set as this rank sees it; without a communicator where this rank is not in it."""

    number: int
    ranks: tuple[int, ...]
    comm: Communicator | None

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def index(self) -> int:
        """This rank's number within the set."""
        return self.members.rank

    @property
    def members(self) -> Communicator:
        """The communicator of the set; only its members are asked to use it."""
        assert self.comm is not None, "this rank is not in the process set"
        return self.comm


class Operation(ABC):
    """What one rank brings, and what it takes away."""

    @abstractmethod
    def start(self, response: Response, group: Group) -> list[Work]:
        """Issue the collectives. Must not wait for them: others wait to be started behind it."""

    @abstractmethod
    def result(self) -> Any:
        """What the caller gets; asked once, when all collectives are done."""


class Nothing(Operation):
    """Operations that are over once every rank has asked for them: a barrier, a join, changes of process sets."""

    def __init__(self) -> None:
        self._number = -1

    def start(self, response: Response, group: Group) -> list[Work]:
        self._number = response.number
        return []

    def result(self) -> int:
        """The response's number."""
        return self._number


class Only(Operation):
    """An operation on one tensor, whose result is not a list."""

    def __init__(self, operation: Operation) -> None:
        self._operation = operation

    def start(self, response: Response, group: Group) -> list[Work]:
        return self._operation.start(response, group)

    def result(self) -> Any:
        (only,) = self._operation.result()
        return only
