"""ByteScheduler's decision (Peng et al., SOSP 2019, section 4): which partition goes next, and whether it may go now. Pure.

ready     ─▶ a queue, most urgent first ─▶ under way, while fewer bytes are than the credit ─▶ done: credit returned
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from itertools import count
from operator import itemgetter
from typing import Generic, TypeVar

__all__ = ["CreditQueue"]

K = TypeVar("K", bound=Hashable)


class CreditQueue(Generic[K]):
    """A priority queue of partitions, the most urgent (lowest priority number) first, equals in order of arrival.

    One is admitted while the bytes under way are below its credit, so a partition larger than the credit travels too,
    alone, and what is under way exceeds the credit by less than one partition.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[tuple[int, int], int, K, int, int]] = []
        self._arrivals = count()
        self._under_way: dict[K, int] = {}

    @property
    def bytes_under_way(self) -> int:
        return sum(self._under_way.values())

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def push(self, key: K, priority: int, nbytes: int, credit: int, step: int = 0) -> None:
        """Add partition `key`, which is ready to be sent.

        Those of an earlier `step` go first, whatever their priority.
        """
        heapq.heappush(self._waiting, ((step, priority), next(self._arrivals), key, nbytes, credit))

    def admit(self) -> list[K]:
        """Take the partitions that may be sent now, in order; each counts as under way until :meth:`release`."""
        admitted = []
        while self._waiting and self.bytes_under_way < self._waiting[0][4]:
            _, _, key, nbytes, _ = heapq.heappop(self._waiting)
            self._under_way[key] = nbytes
            admitted.append(key)
        return admitted

    def admit_all(self) -> list[K]:
        """Take all that waits, in order, whatever the credit. Nothing is admitted after it."""
        waiting, self._waiting = sorted(self._waiting, key=itemgetter(0, 1)), []
        return [key for _, _, key, _, _ in waiting]

    def release(self, key: K) -> None:
        """Return the bytes of `key`, which is done, to the credit. Raises ``KeyError`` for what is not under way."""
        del self._under_way[key]
