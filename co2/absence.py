"""What ``join()`` finds of a co2 optimizer: rounds need every rank, and a rank out of data is told so."""

from __future__ import annotations

from typing import Any

from overlap.attendance import Attendance
from overlap.roll import CannotJoin, Word

__all__ = ["Absence"]


class Absence:
    """Takes part in the roll. All ranks may join together; whoever goes on to the next average alone raises, everywhere."""

    def __init__(self, attendance: Attendance) -> None:
        self._attendance = attendance
        self.topic, self.ranks = attendance.topic, attendance.ranks
        self.obstacle = ""  # there is nothing to be contributed before the next average
        self.issued = False
        self.hyper_parameters: list[dict[str, Any]] = []

    @property
    def place(self) -> tuple[int, int]:
        return self._attendance.place

    def abandon(self) -> None:
        """No round of gradients is this object's."""

    def take_over(self, groups: list[dict[str, Any]]) -> None:
        """Hyper-parameters belong to the ranks that average gradients."""

    def arrive(self) -> None:
        """A round on its way arrives by itself."""

    def follow(self, word: Word) -> None:
        raise CannotJoin(
            f"{word.details['text']} (co2 averages parameters of all ranks: give each the same number of steps)"
        )
