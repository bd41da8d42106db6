"""Time stamps of a step's parts on this rank, from which `overlap.plan.measurement` makes a plan.

While it is there, the engine and transit tell it what they do; nobody does otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from overlap.core.bucket import Bucket
from overlap.plan.measurement import Lap, Sent
from overlap.plan.simulation.network import filled
from overlap.plan.strategy import Collectives
from overlap.transport.communicator import Communicator
from overlap.transport.stamps import Stamp, Stamps
from overlap.transport.work import Work, operations

__all__ = ["StepClock"]


@dataclass(frozen=True, slots=True)
class _Issued:
    kind: str
    bucket: Bucket
    at: Stamp
    by_host: float  # the same moment of the host's clock, on which a work's own seconds are
    work: Work
    over: Stamp | None  # None: the work knows


@dataclass(slots=True)
class _Noted:
    """A lap in stamps. `notes` are for a list of :class:`Lap` each: its name, what comes first there, the stamps."""

    begun: Stamp
    notes: list[tuple[str, tuple[int, ...], tuple[Stamp, ...]]] = field(default_factory=list)
    waits: list[tuple[Stamp, Stamp, _Issued | None]] = field(default_factory=list)
    stepping: Stamp | None = None
    ended: Stamp | None = None


class StepClock:
    """Collects time stamps in laps, one for each step. `slot_of` has the index of each parameter's slot, by ``id()``.

    `late`: which operations of a step are on their way still when it ends, "gather" or "reduce".
    """

    def __init__(self, slot_of: Mapping[int, int], late: str = "gather", stamps: Stamps | None = None) -> None:
        self._stamps: Stamps = Stamps() if stamps is None else stamps
        self.launched = self._stamps.launched
        self.now = self._stamps.now  # a stamp, for whoever tells this clock something later
        self._late = late
        self._slot_of, self._lap, self._issued = slot_of, _Noted(self.now()), list[_Issued]()
        self._laps: list[_Noted] = []
        self._depth, self._unwatched = 0, 0  # modules that forward is inside of; of which this many without gradients
        self._watched: list[tuple[Bucket, Collectives]] = []

    def _note(self, what: str, *stamps: Stamp, of: tuple[int, ...] = ()) -> None:
        self._lap.notes.append((what, of, stamps))

    # - The engine's

    def entered(self, module: torch.nn.Module) -> None:
        """Stamp a forward that is about to wait for what this module holds."""
        self._depth += 1
        if self._unwatched or not torch.is_grad_enabled():
            self._unwatched += 1
            return
        when = self.now()
        for parameter in dict.values(module._parameters):
            index = self._slot_of.get(id(parameter))
            if index is not None:
                self._note("used", when, of=(index,))

    def used(self, index: int) -> None:
        """Stamp a parameter that is about to be handed out."""
        if self._depth and not self._unwatched:
            self._note("used", self.now(), of=(index,))

    def left(self) -> None:
        """Stamp the end of a module's forward."""
        self._depth = max(0, self._depth - 1)
        if self._unwatched:
            self._unwatched -= 1
        elif not self._depth:
            self._note("left", self.now())

    def waited(self, since: Stamp, updated: Bucket | None) -> None:
        """Note a wait for parameters until now; for a bucket that was `updated` after its reduction, until that."""
        mine = (one for one in reversed(self._issued) if one.bucket is updated)
        self._lap.waits.append((since, self.now(), next(mine, None)))

    def passed(self, since: Stamp) -> None:
        """Note that a gate ran until now."""
        self._note("gates", since, self.now())

    def gradient(self, index: int, came: Stamp) -> None:
        """Note a gradient, which is handled by now."""
        self._note("gradients", came, self.now(), of=(index,))

    # - Whose steps they are

    def stepping(self) -> None:
        """``step()`` begins."""
        self._lap.stepping = self.now()

    def stepped(self) -> None:
        """It is over, and with it the lap."""
        self._lap.ended = self.now()
        self._laps.append(self._lap)
        self._lap, self._depth, self._unwatched = _Noted(self.now()), 0, 0

    # - Operations

    def watch(self, order: Sequence[Bucket]) -> None:
        """Note, from now on, the operations of these buckets."""
        self._watched = [(bucket, bucket.collectives) for bucket in order]
        for bucket, collectives in self._watched:
            bucket.collectives = _Watched(collectives, self.now, self._sends)

    def _sends(self, kind: str, bucket: Bucket, at: Stamp, by_host: float) -> None:
        """An operation was issued, from `at` until now."""
        assert bucket.work is not None, "it was issued"
        over = self._stamps.over(bucket.work, (kind, bucket.lane))
        self._issued.append(_Issued(kind, bucket, at, by_host, bucket.work, over))
        self._note("issues", at, self.now())

    def unwatch(self) -> None:
        for bucket, collectives in self._watched:
            bucket.collectives = collectives
        self._watched = []

    # - What was found

    def read(self) -> tuple[list[Lap], list[Sent]]:
        """All laps that are over, in seconds of the host's clock, and their operations, in order of issue; but those that
        were late in the last lap. A host that launches waits for its device.
        """
        seconds = self._stamps.reader()
        laps = [_in_seconds(lap, seconds) for lap in self._laps]
        if not laps:
            return laps, []
        until = {self._late: laps[-1].begun}
        over = [one for one in self._issued if seconds(one.at) < until.get(one.kind, laps[-1].ended)]
        return laps, sorted((sent for one in over for sent in _sent(one, seconds)), key=lambda sent: sent.issued)


def _in_seconds(noted: _Noted, seconds: Callable[[Stamp], float]) -> Lap:
    lap = Lap(seconds(noted.begun), stepping=seconds(noted.stepping), ended=seconds(noted.ended))
    for what, first, stamps in noted.notes:
        values = (*first, *map(seconds, stamps))
        getattr(lap, what).append(values[0] if len(values) == 1 else values)
    for since, until, issued in noted.waits:
        begin, end = seconds(since), seconds(until)
        ends = [] if issued is None else _ends(issued, seconds)
        lap.waits.append((begin, min(end, max([begin, *ends])) if ends else end))
    return lap


def _ends(one: _Issued, seconds: Callable[[Stamp], float]) -> list[float]:
    """When its operations were over."""
    if one.over is not None:
        return [seconds(one.over)]
    parts = operations(one.work)
    return [one.by_host + one.work.seconds] if parts is None else [at + work.seconds for at, work in parts]


def _sent(one: _Issued, seconds: Callable[[Stamp], float]) -> list[Sent]:
    bucket, at = one.bucket, seconds(one.at)
    wire = bucket.travelling if one.kind == "gather" else bucket.outgoing
    halves = 2 if one.kind == "reduce" and not bucket.sharded else 1
    most = filled(bucket.shares) if bucket.sharded else 1.0
    parts = operations(one.work) if one.over is None else None
    if parts is None:
        spans = [(at, _ends(one, seconds)[0], wire.nbytes)]
    else:
        spans = [(begun, begun + work.seconds, work.nbytes) for begun, work in parts]
    whole = max(1, wire.nbytes)
    return [
        Sent(one.kind, bucket.index, bucket.nbytes * sent // whole, sent, halves, bucket.lane, begun, ended, most)
        for begun, ended, sent in spans
    ]


class _Watched:
    """Collectives of which each operation is told: its kind, its bucket, and when it was about to be issued."""

    def __init__(
        self, inner: Collectives, now: Callable[[], Stamp], told: Callable[[str, Bucket, Stamp, float], None]
    ) -> None:
        self._inner, self._now, self._told = inner, now, told

    def reduce(self, comm: Communicator, bucket: Any) -> None:
        when, by_host = self._now(), time.perf_counter()
        self._inner.reduce(comm, bucket)
        self._told("reduce", bucket, when, by_host)

    def gather(self, comm: Communicator, bucket: Any) -> bool:
        when, by_host = self._now(), time.perf_counter()
        held = self._inner.gather(comm, bucket)
        self._told("gather", bucket, when, by_host)
        return held
