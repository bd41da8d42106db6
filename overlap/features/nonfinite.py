"""Averaged gradients that are infinite or NaN: found, where a parameter would never be finite again.

Each rank looks at the part of the averages that is its own, a P-th of them, by one sum. What it finds, the others are told
in the tally of the next call that closes a round, so nothing is sent for it. By then parameters were updated. Where steps
are to be left out instead, all ranks have to know before they update, by one all-reduce of a number in ``step()``.

A GradScaler's steps are not looked at: it looks itself.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from operator import attrgetter

import torch

from overlap.core.bucket import Bucket, Slot
from overlap.core.feature import Feature
from overlap.transport.communicator import Communicator, ReduceOp

__all__ = ["CHOICES", "NonfiniteCheck", "NonfiniteGradient", "SkippedSteps", "nonfinite"]

log = logging.getLogger("dear")

#: What may be done about them.
CHOICES = ("raise", "skip", "ignore")

_NARROW = (torch.float16, torch.bfloat16)
_NONE = 2**62

_holds_parameters = attrgetter("holds_parameters")


class NonfiniteGradient(RuntimeError):
    """An averaged gradient was infinite or NaN."""


class NonfiniteCheck(Feature):
    """Raises on all ranks, in the call after ``step()`` that closes a round, where averages were not finite."""

    def __init__(self) -> None:
        self._found: tuple[Slot, int] | None = None  # which, and in which round
        self._unread: list[tuple[torch.Tensor, Bucket]] = []  # sums on a GPU, which nobody has waited for

    def used(self, buckets: Sequence[Bucket]) -> None:
        if self._found is not None:
            return
        shards = all(map(_holds_parameters, buckets))
        for bucket, flat in [(each, each.reduced) for each in buckets] if shards else _looked_at(buckets):
            total = flat.sum(dtype=torch.float32 if flat.dtype in _NARROW else None)
            if total.is_cuda:
                self._unread.append((total, bucket))
            elif not math.isfinite(abs(total.item())):  # or too large a sum
                slot = nonfinite(bucket)
                if slot is not None:
                    self._found = slot, bucket.round
                    return

    def verify(self) -> None:
        unread, self._unread = self._unread, []
        for total, bucket in unread:
            if self._found is None and not math.isfinite(abs(total.item())):
                self._found = bucket.slots[0], bucket.round
        found, self._found = self._found, None
        if found is not None:
            raise NonfiniteGradient(_message(*found))

    def ending(self) -> None:
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
        first = next((slot.index for bucket in buckets if (slot := nonfinite(bucket)) is not None), _NONE)
        if self._comm.size > 1:
            agreed = torch.tensor([first], dtype=torch.int64, device="cpu")
            self._comm.all_reduce(agreed, agreed, ReduceOp.MIN, label="infinities")
            first = int(agreed)
        if first == _NONE:
            return False
        self.count += 1
        if self._comm.rank == 0 and self.count & (self.count - 1) == 0:
            log.warning(
                "step %d is left out on all ranks: the averaged gradient of %r is infinite or NaN (on_nonfinite='skip'; "
                "%d step(s) so far)",
                step,
                self._slots[first].name,
                self.count,
            )
        return True


def _looked_at(buckets: Iterable[Bucket]) -> list[tuple[Bucket, torch.Tensor]]:
    """This rank's part of the averages that an update uses; where a script has put others into ``.grad``, all of these."""
    found = []
    for bucket in buckets:  # in every step: without a call for each
        if bucket.holds_parameters:
            found.append((bucket, bucket.reduced))
        elif bucket.lone or any(slot.param.grad is not slot.view and not slot.unused for slot in bucket.slots):
            given = (slot.param.grad for slot in bucket.slots)
            found += [(bucket, each) for each in given if each is not None and each.layout is torch.strided]
        else:
            found.append((bucket, bucket.gradients[bucket.own]))
    return found


def nonfinite(bucket: Bucket) -> Slot | None:
    """The first parameter of `bucket` whose average, in this rank's part, is infinite or NaN."""
    for _, flat in _looked_at([bucket]):
        if bool(torch.isfinite(flat).all()):
            continue
        for slot, gradient in _parts(bucket, flat):
            if not bool(torch.isfinite(gradient).all()):
                return slot
    return None


def _parts(bucket: Bucket, flat: torch.Tensor) -> Iterable[tuple[Slot, torch.Tensor]]:
    """What `flat`, one of those that were looked at, has of each parameter."""
    for slot, offset in zip(bucket.slots, bucket.spec.offsets, strict=True):
        if flat is slot.param.grad:
            yield slot, flat
        low, high = max(offset, bucket.own.start), min(offset + slot.param.numel(), bucket.own.stop)
        if flat.numel() == bucket.own.stop - bucket.own.start and flat.dim() == 1 and low < high:
            yield slot, flat[low - bucket.own.start : high - bucket.own.start]
