"""Finds averaged gradients that are infinite or NaN, and raises, or skips the step.

Each rank looks at the part of the averages that is its own, a P-th of them, by one sum. What it finds, the others are told
in the tally of the next call that closes a round, so nothing is sent for it. By then parameters were updated. Where steps
are to be left out instead, all ranks have to know before they update, by one all-reduce of a number in ``step()``.

A GradScaler's steps are not looked at: it looks itself.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

import torch

from overlap.core.bucket import Bucket, Slot
from overlap.core.feature import Feature
from overlap.job.axes import axes_of
from overlap.transport.communicator import Communicator, ReduceOp
from overlap.transport.cuda import streams
from overlap.transport.cuda.streams import Reading
from overlap.transport.operation import all_reduce

__all__ = ["CHOICES", "NonfiniteCheck", "NonfiniteGradient", "SkippedSteps"]

log = logging.getLogger("dear")

#: What may be done about them.
CHOICES = ("raise", "skip", "ignore")

_NARROW = (torch.float16, torch.bfloat16)
_NONE = 2**62

_sharded = attrgetter("sharded")


class NonfiniteGradient(RuntimeError):
    """An averaged gradient was infinite or NaN."""


class NonfiniteCheck(Feature):
    """Raises on all ranks, in the call after ``step()`` that closes a round, where averages were not finite.

    On a device that is the first such call for which the device has come so far: the host does not wait for it.
    """

    def __init__(self) -> None:
        self._found: tuple[Slot, int] | None = None  # which, and in which round
        self._launched = False  # averages are on a device
        self._parts: list[_Part] = []  # on a device, of this round
        self._readings: list[tuple[Sequence[_Part], Reading]] = []

    def planned(self, order: Sequence[Bucket]) -> None:
        self._launched = any(streams.on_device(bucket.gradients.shard) for bucket in order)

    def used(self, buckets: Sequence[Bucket]) -> None:
        if self._found is not None:
            return
        shards = all(map(_sharded, buckets))
        for bucket, flat in [(each, each.gradients.shard) for each in buckets] if shards else _looked_at(buckets):
            if self._launched:
                self._parts += _parts(bucket, flat)
                continue
            total = flat.sum(dtype=torch.float32 if flat.dtype in _NARROW else None)
            if not math.isfinite(abs(total.item())):  # or too large a sum
                slot = _nonfinite(bucket)
                if slot is not None:
                    self._found = slot, bucket.round
                    return

    def ended(self) -> None:
        if self._parts:
            parts, largest = _largest(self._parts)
            self._parts = []
            self._readings.append((parts, Reading(largest)))

    def verify(self) -> None:
        while self._readings and self._readings[0][1].there():
            self._read()
        found, self._found = self._found, None
        if found is not None:
            raise NonfiniteGradient(_message(*found))

    def _read(self) -> None:
        parts, reading = self._readings.pop(0)
        found = _first(parts, reading.values())
        if found is not None and self._found is None:
            self._found = found.slot, found.round

    def ending(self) -> None:
        while self._readings:
            self._read()
        if self._found is not None:
            log.error("%s", _message(*self._found))


def _message(slot: Slot, step: int) -> str:
    return (
        f"the averaged gradient of {slot.name!r} was infinite or NaN in step {step}, and parameters were updated by it. "
        "on_nonfinite='skip' leaves such steps out, on all ranks; 'ignore' goes on, as torch does"
    )


class SkippedSteps:
    """Decides, on all ranks of `comm` alike, whether a step is left out; `count` says how many were."""

    def __init__(self, comm: Communicator, slots: Sequence[Slot]) -> None:
        self._comm, self._slots = comm, slots
        self.count = 0

    def skips(self, buckets: Iterable[Bucket], step: int) -> bool:
        """Whether any average is infinite or NaN; reductions were awaited. On every rank."""
        first = self._mine(list(buckets))
        if self._comm.size > 1:
            agreed = torch.tensor([first], dtype=torch.int64, device="cpu")
            self._comm.run(all_reduce(agreed, agreed, ReduceOp.MIN, label="infinities"))
            first = int(agreed)
        bad = first != _NONE
        for axis in axes_of(slot.param for slot in self._slots):
            agreed = torch.tensor([bad], dtype=torch.int64, device="cpu")
            axis.comm.run(all_reduce(agreed, agreed, ReduceOp.MAX, label="infinities"))
            bad = bool(agreed)
        if not bad:
            return False
        self.count += 1
        if self._comm.rank == 0 and self.count & (self.count - 1) == 0:
            log.warning(
                "step %d is left out on all ranks: the averaged gradient of %r is infinite or NaN (on_nonfinite='skip'; "
                "%d step(s) so far)",
                step,
                self._slots[first].name if first != _NONE else "a parameter that other ranks have",
                self.count,
            )
        return True

    def _mine(self, buckets: Sequence[Bucket]) -> int:
        """The index of the first parameter whose average, in this rank's part, is not finite. A device is read once."""
        if not any(streams.on_device(bucket.gradients.shard) for bucket in buckets):
            return next((slot.index for bucket in buckets if (slot := _nonfinite(bucket)) is not None), _NONE)
        parts = [part for bucket, flat in _looked_at(buckets) for part in _parts(bucket, flat)]
        if not parts:
            return _NONE
        parts, largest = _largest(parts)
        found = _first(parts, largest.tolist())
        return _NONE if found is None else found.slot.index


def _looked_at(buckets: Iterable[Bucket]) -> list[tuple[Bucket, torch.Tensor]]:
    """This rank's part of the averages that an update uses; where a script has put others into ``.grad``, all of these."""
    found = []
    for bucket in buckets:  # in every step: without a call for each
        if bucket.sharded:
            found.append((bucket, bucket.gradients.shard))
        elif bucket.lone or any(slot.param.grad is not slot.view and not slot.unused for slot in bucket.slots):
            given = (slot.param.grad for slot in bucket.slots)
            found += [(bucket, each) for each in given if each is not None and each.layout is torch.strided]
        else:
            found.append((bucket, bucket.gradients.whole[bucket.own]))
    return found


def _nonfinite(bucket: Bucket) -> Slot | None:
    """The first parameter of `bucket` whose average, in this rank's part, is infinite or NaN. On the host."""
    for _, flat in _looked_at([bucket]):
        if not bool(torch.isfinite(flat).all()):
            return next(
                (one.slot for one in _parts(bucket, flat) if not bool(torch.isfinite(one.gradient).all())), None
            )
    return None


class _Part(NamedTuple):
    """What this rank looks at of one parameter's average."""

    slot: Slot
    round: int
    gradient: torch.Tensor


def _parts(bucket: Bucket, flat: torch.Tensor) -> Iterator[_Part]:
    """What `flat`, one of those that were looked at, has of each parameter."""
    for slot, offset in zip(bucket.slots, bucket.spec.offsets, strict=True):
        low, high = max(offset, bucket.own.start), min(offset + slot.param.numel(), bucket.own.stop)
        if flat is slot.param.grad:
            yield _Part(slot, bucket.round, flat)
        elif flat.numel() == bucket.own.stop - bucket.own.start and flat.dim() == 1 and low < high:
            yield _Part(slot, bucket.round, flat[low - bucket.own.start : high - bucket.own.start])


def _largest(parts: Iterable[_Part]) -> tuple[list[_Part], torch.Tensor]:
    """The absolute value of the largest element of each part, where they lie: infinite or NaN where one element is.

    With the parts in that order. A few launches for any number of them.
    """
    ordered = sorted(parts, key=_kind)
    found = []
    for _, alike in groupby(ordered, key=_kind):
        norms = torch._foreach_norm([part.gradient for part in alike], math.inf)
        found.append(torch.stack(list(norms)).double())
    return ordered, torch.cat([each.to(found[0].device) for each in found])


def _kind(part: _Part) -> tuple[str, str]:
    return str(part.gradient.device), str(part.gradient.dtype)


def _first(parts: Sequence[_Part], largest: Sequence[float]) -> _Part | None:
    found = [part for part, value in zip(parts, largest, strict=True) if not math.isfinite(value)]
    return min(found, key=lambda part: part.slot.index, default=None)
