"""Checks that gradients were not changed after they were sent."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from overlap.core.bucket import Bucket
from overlap.core.feature import Feature
from overlap.core.round import gradient_changed
from overlap.transport.native import changed_sample, take_samples

__all__ = ["GradientCheck", "Samples"]

_SAMPLES = 8  # of each gradient


class Samples:
    """Samples of the gradients of type `dtype` in a flat buffer on the CPU; the buffer itself is not kept."""

    def __init__(self, dtype: torch.dtype, starts: Sequence[int], numels: Sequence[int]) -> None:
        spread = torch.arange(_SAMPLES, device="cpu")
        last = torch.tensor([max(numel - 1, 0) for numel in numels], device="cpu")[:, None]
        self._places = (torch.tensor(starts, device="cpu")[:, None] + last * spread // (_SAMPLES - 1)).flatten()
        self._kept = torch.empty(len(self._places), dtype=dtype, device="cpu")

    def take(self, flat: torch.Tensor) -> None:
        """Take samples of the gradients in `flat`, which are sent as they are now."""
        take_samples(self._kept, flat, self._places)

    def broken(self, flat: torch.Tensor) -> int | None:
        """Which gradient in `flat` was changed since :meth:`take`, by its samples."""
        changed = changed_sample(self._kept, flat, self._places)  # by its bits: a NaN is what it was
        return None if changed is None else changed // _SAMPLES


class GradientCheck(Feature):
    """Raises for gradients that were changed after they were sent.

    Autograd's versions tell of changes, but not of those through ``p.grad.data`` or ``p.grad.numpy()``. What these change
    may have been sent before, or not yet: ranks would average old and new values. Of buckets on the CPU whose gradients
    stay where they are.
    """

    def __init__(self) -> None:
        self._samples: dict[Bucket, Samples] = {}
        self._taken: list[Bucket] = []

    def planned(self, order: Sequence[Bucket]) -> None:
        known = self._samples
        self._samples = {
            bucket: known.get(bucket) or _samples(bucket)
            for bucket in order
            if bucket.sharded and not bucket.frees_gradients and bucket.gradients.whole.device.type == "cpu"
        }
        self._taken = [bucket for bucket in self._taken if bucket in self._samples]

    def filled(self, bucket: Bucket) -> None:
        samples = self._samples.get(bucket)
        if samples is not None:
            samples.take(bucket.gradients.whole)
            self._taken.append(bucket)

    def verify(self) -> None:
        for bucket in self._taken:
            broken = self._samples[bucket].broken(bucket.gradients.whole)
            if broken is not None:
                raise gradient_changed(bucket.slots[broken], "changed")

    def ended(self) -> None:
        self._taken.clear()


def _samples(bucket: Bucket) -> Samples:
    # A tensor without elements may start behind the last one; looking one earlier is harmless, it has no extent.
    starts = [min(offset, bucket.spec.padded_numel - 1) for offset in bucket.spec.offsets]
    return Samples(bucket.gradients.whole.dtype, starts, [slot.param.numel() for slot in bucket.slots])
