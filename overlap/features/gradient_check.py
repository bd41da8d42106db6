"""Whether gradients are still as they were sent."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from overlap.transport.native import changed_sample, take_samples

__all__ = ["GradientCheck"]

_SAMPLES = 8  # of each gradient


class GradientCheck:
    """Samples of gradients that lie in one flat buffer, on the CPU, and stay there while others are told of them.

    Autograd's versions tell of changes, but not of those through ``p.grad.data`` or ``p.grad.numpy()``. What these change
    may have been sent before, or not yet: ranks would average old and new values.
    """

    def __init__(self, flat: torch.Tensor, starts: Sequence[int], numels: Sequence[int]) -> None:
        self._flat, self._closed = flat, False
        spread = torch.arange(_SAMPLES, device="cpu")
        last = torch.tensor([max(numel - 1, 0) for numel in numels], device="cpu")[:, None]
        self._places = (torch.tensor(starts, device="cpu")[:, None] + last * spread // (_SAMPLES - 1)).flatten()
        self._kept = flat.new_empty(len(self._places))

    def close(self) -> None:
        """The gradients are all there, and sent as they are now."""
        take_samples(self._kept, self._flat, self._places)
        self._closed = True

    def open(self) -> None:
        """They may change."""
        self._closed = False

    def broken(self) -> int | None:
        """Which gradient was changed since :meth:`close`, by its samples."""
        if not self._closed:
            return None
        changed = changed_sample(self._kept, self._flat, self._places)  # by its bits: a NaN is what it was
        return None if changed is None else changed // _SAMPLES
