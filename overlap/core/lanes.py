"""Communicators side by side, for buckets that travel at the same time.

Operations on one communicator follow one another. Where shards are equal each of them keeps all links busy; where one rank
owns most of a bucket, the way from it idles in the reduction, and the ways to it in the gathering. Buckets whose owners
differ take different lanes, and use both directions together. Which lane a bucket takes is in its plan, so each lane's
order is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from overlap.core.bucket import Bucket
from overlap.transport.communicator import Communicator

__all__ = ["Lanes"]


class Lanes:
    """The communicators that carry one optimizer's reductions, or its gathers."""

    def __init__(self, comms: Sequence[Communicator]) -> None:
        self._comms = tuple(comms)

    def __iter__(self) -> Iterator[Communicator]:
        return iter(self._comms)

    @property
    def first(self) -> Communicator:
        return self._comms[0]

    def of(self, bucket: Bucket) -> Communicator:
        """By the rank that owns the most of it."""
        if len(self._comms) == 1:
            return self._comms[0]
        return self._comms[bucket.shares.index(max(bucket.shares)) % len(self._comms)]
