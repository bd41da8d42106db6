"""Whether gradients are still as they were sent."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["Seal"]

_SAMPLES = 8  # of each gradient


class Seal:
    """Samples of gradients that lie in one flat buffer, on the CPU, and stay there while others are told of them.

    Autograd's versions tell of changes, but not of those through ``p.grad.data`` or ``p.grad.numpy()``. What these change
    may have been sent before, or not yet: ranks would average old and new values.
    """

    def __init__(self, flat: torch.Tensor, starts: Sequence[int], numels: Sequence[int]) -> None:
        self._flat, self._count = flat, len(starts)
        spread = torch.arange(_SAMPLES, device="cpu")
        last = torch.tensor([max(numel - 1, 0) for numel in numels], device="cpu")[:, None]
        self._places = (torch.tensor(starts, device="cpu")[:, None] + last * spread // (_SAMPLES - 1)).flatten()
        self._kept: torch.Tensor | None = None

    def close(self) -> None:
        """The gradients are all there, and sent as they are now."""
        self._kept = self._look()

    def open(self) -> None:
        """They may change."""
        self._kept = None

    def broken(self) -> int | None:
        """Which gradient was changed since :meth:`close`, by its samples."""
        if self._kept is None:
            return None
        now = self._look()
        if torch.equal(now, self._kept):
            return None
        same = (_bytes(now, self._count) == _bytes(self._kept, self._count)).all(dim=1)  # a NaN is what it was
        return None if bool(same.all()) else same.tolist().index(False)

    def _look(self) -> torch.Tensor:
        return self._flat.index_select(0, self._places)


def _bytes(samples: torch.Tensor, count: int) -> torch.Tensor:
    return samples.view(torch.uint8).view(count, -1)
