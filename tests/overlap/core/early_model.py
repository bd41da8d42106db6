"""Early updates in the model: which buckets, how many, and in which order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from overlap.plan.early import next_count, spread
from tests.overlap.core.channels_model import Waits

if TYPE_CHECKING:
    from tests.overlap.core.round_model import Part

_UNKNOWN = -1


class Early:
    """As `overlap.features.early.EarlyUpdates`, on one optimizer of one rank. All buckets but the last are candidates."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self._candidates = part.kind.buckets - 1
        self._chosen = spread(self._candidates, self._candidates)
        self._counted: int | None = None  # the operation that agrees on how many come early in the next step
        self._updated: list[int] = []
        self._looked = self._spare = self._learned = False

    def _begin(self) -> Waits[None]:
        if self._counted is not None:
            found = yield from self._part.data.read(self._counted)
            possible, self._counted = min(found.values()), None
            if possible != _UNKNOWN:
                planned, self._learned = len(self._chosen) if self._learned else 0, True
                self._chosen = spread(self._candidates, next_count(planned, possible, self._candidates))
        self._looked = self._spare = False

    def poll(self, bucket: int) -> Waits[None]:
        """A gradient of `bucket` is there."""
        if not self._looked:
            yield from self._begin()
            self._looked = True
        if bucket == self._part.kind.buckets - 1 or self._part.draw.random() < 0.3:  # the wire is not quiet
            return
        done = len(self._updated)
        if done == len(self._chosen):
            self._spare = True
            return
        number = self._part.sent.get(self._chosen[done])
        if number is not None and self._part.data.done(number):
            yield from self._update(self._chosen[done])

    def make_up(self) -> Waits[set[int]]:
        """In step(): the rest of the chosen. Returns what needs no update any more."""
        if not self._looked:
            yield from self._begin()
        room = len(self._updated) + self._spare if self._looked else _UNKNOWN
        for bucket in self._chosen[len(self._updated) :]:
            yield from self._update(bucket)
        updated, self._updated, self._looked = set(self._updated), [], False
        self._counted = self._part.data.post(self._part.rank, ("early", self._part.round), room)
        return updated

    def _update(self, bucket: int) -> Waits[None]:
        yield from self._part.update(bucket)
        self._updated.append(bucket)
