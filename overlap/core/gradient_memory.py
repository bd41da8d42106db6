"""Bounds the memory of gradients that are on their way, of freed buckets."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection
from statistics import median

import comm_core
from overlap.core.bucket import Bucket
from overlap.core.buckets.heap import Holes
from overlap.job.memory.counted import available_bytes, resident_bytes

__all__ = ["GradientMemory"]

_FIRST_PATIENCE = 1.0  # seconds, before it is known how long a reduction takes …
_KNOWN = 32  # … by so many
_LEAST_PATIENCE = 0.5
_LIMITED_PATIENCE = 5.0  # … and the least, where memory is limited
_HOLES = 2.5  # gradients of a bucket, where memory is limited: more holes in the heap than these are returned …
_HOLES_NEAR, _NEAR = 1.25, 5  # … and than these, where less than so many gradients are left below the limit
_LONGER = 8  # times the median of these reductions: not the longest, which have waited for another rank's patience
_MOST_REST = 64  # rounds
_MOST_PATIENCE = 60.0  # seconds, where there is no memory to go on without waiting


class GradientMemory:
    """Awaits reductions where more than `room` bytes of gradients are on their way, of all optimizers of a model.

    Not for ever: backward on another rank may leave modules out, whose buckets it reduces in ``step()`` only, and need
    this rank for its way there. Where that happens, more memory is taken, and for some rounds nothing is awaited; but where
    there is none for `all` gradients, each is awaited for a minute. The process may have `limit` bytes in memory, where
    that is not None; where it has more than `high` then, holes in the heap are returned.

    Where the host does not wait (:attr:`streams_wait`), the stream of the computation does, as long as it takes: a carrier
    that does so needs one order of all operations on all ranks anyway.
    """

    def __init__(self, room: Callable[[], int], all: Callable[[], int]) -> None:
        self._room, self._all = room, all
        self.streams_wait = False
        self.limit: int | None = None
        self.high = 0
        self.used = False
        self.waited = 0.0  # seconds, so far
        self._flying: deque[Bucket] = deque()
        self._holes = Holes()
        self._patience = _FIRST_PATIENCE
        self._seconds: deque[float] = deque(maxlen=_KNOWN)
        self._rest, self._next_rest = 0, 4  # rounds

    def take(self, bucket: Bucket) -> None:
        """`bucket` is about to be reduced."""
        self.used = True
        if self.limit is None:
            self._holes.bound(self._room())
        elif (taken := resident_bytes()) > self.high:
            near = taken + _NEAR * bucket.nbytes >= self.limit
            holes = _HOLES_NEAR if near else _HOLES  # one is what the next gradient needs
            self._holes.bound(int(holes * bucket.nbytes), exact=True)
        bucket.hold_gradients()
        self._flying.append(bucket)
        while len(self._flying) > 1 and sum(each.nbytes for each in self._flying) > self._room():
            first = self._flying[0]
            work = first.work
            if self.streams_wait:
                first.settle()
            elif work is not None:
                if self._rest and not work.done() and not self._scarce:
                    return
                since = time.perf_counter()
                patience = self._patience if self.limit is None else max(self._patience, _LIMITED_PATIENCE)
                try:
                    work.wait(patience)
                except comm_core.TimeoutError:
                    if self._scarce:
                        self._patience = min(2 * patience, _MOST_PATIENCE)
                        if self._patience < _MOST_PATIENCE:
                            continue
                    self._rest, self._next_rest = self._next_rest, min(2 * self._next_rest, _MOST_REST)
                    return
                finally:
                    self.waited += time.perf_counter() - since
                self._seconds.append(work.seconds)
                known = len(self._seconds) == _KNOWN
                self._patience = max(_LEAST_PATIENCE, _LONGER * median(self._seconds)) if known else _FIRST_PATIENCE
                first.settle()
            self._flying.popleft()

    @property
    def _scarce(self) -> bool:
        spare = available_bytes()
        return (spare if self.limit is None else min(spare, self.limit - resident_bytes())) < self._all()

    def give_up(self) -> None:
        """This round is dropped, and its reductions go without waiting."""
        self._rest = max(1, self._rest)

    def end_round(self, order: Collection[Bucket]) -> None:
        """A round of an optimizer is over, whose buckets are `order`."""
        self._flying = deque(each for each in self._flying if each not in order)
        if not self._flying:
            self._rest = max(0, self._rest - 1)
