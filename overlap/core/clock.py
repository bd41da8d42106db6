"""Stamps of where a step's time goes on this rank, for a plan made from them: `overlap.plan.measurement` reads them.

While it is there, the engine and transit tell it what they do; nobody does otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from overlap.core.bucket import Bucket
from overlap.plan.measurement import Lap, Sent
from overlap.plan.simulation.network import filled
from overlap.plan.strategy import Collectives
from overlap.transport.communicator import Communicator
from overlap.transport.work import Work, operations

__all__ = ["StepClock"]

_now = time.perf_counter


@dataclass(frozen=True, slots=True)
class _Issued:
    kind: str
    bucket: Bucket
    at: float
    work: Work


class StepClock:
    """Collects laps, a step each. `slot_of` has the index of each parameter's slot, by ``id()``.

    `late`: which operations of a step are on their way still when it ends, "gather" or "reduce".
    """

    def __init__(self, slot_of: Mapping[int, int], late: str = "gather") -> None:
        self.laps: list[Lap] = []
        self._late = late
        self._slot_of, self._lap, self._issued = slot_of, Lap(begun=_now()), list[_Issued]()
        self._depth, self._unwatched = 0, 0  # modules that forward is inside of; of which this many without gradients
        self._watched: list[tuple[Bucket, Collectives]] = []

    # - The engine's

    def entered(self, module: torch.nn.Module) -> None:
        """A forward is about to wait for what this module holds."""
        self._depth += 1
        if self._unwatched or not torch.is_grad_enabled():
            self._unwatched += 1
            return
        when = _now()
        for parameter in dict.values(module._parameters):
            index = self._slot_of.get(id(parameter))
            if index is not None:
                self._lap.used.append((index, when))

    def used(self, index: int) -> None:
        """A parameter is about to be handed out."""
        if self._depth and not self._unwatched:
            self._lap.used.append((index, _now()))

    def left(self) -> None:
        """A module's forward is over."""
        self._depth = max(0, self._depth - 1)
        if self._unwatched:
            self._unwatched -= 1
        elif not self._depth:
            self._lap.left.append(_now())

    def waited(self, since: float, updated: Bucket | None) -> None:
        """For parameters, until now; those of a bucket that was `updated` when its reduction was over, until it was."""
        until = _now()
        if updated is not None:
            mine = (one for one in reversed(self._issued) if one.bucket is updated)
            until = min(until, max(since, next((max(_ends(one), default=until) for one in mine), until)))
        self._lap.waits.append((since, until))

    def passed(self, since: float) -> None:
        """A gate ran, until now."""
        self._lap.gates.append((since, _now()))

    def gradient(self, index: int, came: float) -> None:
        """It is handled by now."""
        self._lap.gradients.append((index, came, _now()))

    # - Whose steps they are

    def stepping(self) -> None:
        """``step()`` begins."""
        self._lap.stepping = _now()

    def stepped(self) -> None:
        """It is over, and with it the lap."""
        self._lap.ended = _now()
        self.laps.append(self._lap)
        self._lap, self._depth, self._unwatched = Lap(begun=_now()), 0, 0

    # - Operations

    def watch(self, order: Sequence[Bucket]) -> None:
        """Note what these buckets send, from now on."""
        self._watched = [(bucket, bucket.collectives) for bucket in order]
        for bucket, collectives in self._watched:
            bucket.collectives = _Noted(collectives, self._note)

    def _note(self, kind: str, bucket: Bucket, at: float) -> None:
        """An operation was issued, from `at` until now."""
        assert bucket.work is not None, "it was issued"
        self._issued.append(_Issued(kind, bucket, at, bucket.work))
        self._lap.issues.append((at, _now()))

    def unwatch(self) -> None:
        for bucket, collectives in self._watched:
            bucket.collectives = collectives
        self._watched = []

    def sent(self) -> list[Sent]:
        """The operations of all laps that are over, in order of issue; but those that were late in the last lap."""
        if not self.laps:
            return []
        last = self.laps[-1]
        until = {self._late: last.begun}
        over = (one for one in self._issued if one.at < until.get(one.kind, last.ended))
        return sorted((sent for one in over for sent in _sent(one)), key=lambda sent: sent.issued)


def _ends(one: _Issued) -> list[float]:
    """When its operations were over."""
    parts = operations(one.work)
    return [one.at + one.work.seconds] if parts is None else [at + work.seconds for at, work in parts]


def _sent(one: _Issued) -> list[Sent]:
    bucket, halves, most = one.bucket, 1, 1.0
    if one.kind == "gather":
        wire = bucket.travelling
    else:
        wire = bucket.outgoing
        halves = 1 if bucket.holds_parameters else 2
    if bucket.holds_parameters:
        most = filled(bucket.shares)
    nbytes = wire.numel() * wire.element_size()
    parts = operations(one.work)
    if parts is None:
        ended = one.at + one.work.seconds
        return [Sent(one.kind, bucket.index, bucket.nbytes, nbytes, halves, bucket.lane, one.at, ended, most)]
    return [
        Sent(
            one.kind,
            bucket.index,
            bucket.nbytes * work.nbytes // max(1, nbytes),
            work.nbytes,
            halves,
            bucket.lane,
            at,
            at + work.seconds,
            most,
        )
        for at, work in parts
    ]


class _Noted:
    """Collectives of which each operation is told: its kind, its bucket, and when it was about to be issued."""

    def __init__(self, inner: Collectives, told: Callable[[str, Bucket, float], None]) -> None:
        self._inner, self._told = inner, told

    def reduce(self, comm: Communicator, bucket: Any) -> None:
        when = _now()
        self._inner.reduce(comm, bucket)
        self._told("reduce", bucket, when)

    def gather(self, comm: Communicator, bucket: Any) -> bool:
        when = _now()
        held = self._inner.gather(comm, bucket)
        self._told("gather", bucket, when)
        return held
