"""Bounds the memory of gradients that are on their way, of freed buckets."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import comm_core
from overlap.core.bucket import Bucket
from overlap.core.buckets.heap import Holes
from overlap.job.memory import available_bytes

__all__ = ["GradientMemory"]

_FIRST_PATIENCE = 1.0  # seconds, before it is known how long a reduction takes
_LEAST_PATIENCE = 0.5
_LONGER = 4  # times the longest reduction so far
_MOST_REST = 64  # rounds
_MOST_PATIENCE = 60.0  # seconds, where there is no memory to go on without waiting


class GradientMemory:
    """Awaits reductions where more than `room` bytes of gradients are on their way.

    Not for ever: backward on another rank may leave modules out, whose buckets it reduces in ``step()`` only, and need
    this rank for its way there. Where that happens, more memory is taken, and for some rounds nothing is awaited; but where
    there is none for `all` gradients, each is awaited for a minute.
    """

    def __init__(self, room: Callable[[], int], all: Callable[[], int]) -> None:
        self._room, self._all = room, all
        self.used = False
        self._flying: deque[Bucket] = deque()
        self._holes = Holes()
        self._patience = _FIRST_PATIENCE
        self._longest = 0.0
        self._rest, self._next_rest = 0, 4  # rounds

    def take(self, bucket: Bucket) -> None:
        """`bucket` is about to be reduced."""
        self.used = True
        self._holes.bound(self._room())
        bucket.gradients.restore()
        self._flying.append(bucket)
        while len(self._flying) > 1 and sum(each.nbytes for each in self._flying) > self._room():
            first = self._flying[0]
            work = first.work
            if work is not None:
                if self._rest and not work.done() and not self._scarce:
                    return
                try:
                    work.wait(self._patience)
                except comm_core.TimeoutError:
                    if self._scarce:
                        self._patience = min(2 * self._patience, _MOST_PATIENCE)
                        if self._patience < _MOST_PATIENCE:
                            continue
                    self._rest, self._next_rest = self._next_rest, min(2 * self._next_rest, _MOST_REST)
                    return
                self._longest = max(self._longest, work.seconds)
                self._patience = max(_LEAST_PATIENCE, _LONGER * self._longest)
                first.settle()
            self._flying.popleft()

    @property
    def _scarce(self) -> bool:
        return available_bytes() < self._all()

    def give_up(self) -> None:
        """This round is dropped, and its reductions go without waiting."""
        self._rest = max(1, self._rest)

    def end_round(self) -> None:
        self._flying.clear()
        self._rest = max(0, self._rest - 1)
