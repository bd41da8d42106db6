"""Warns where all ranks train on the same data, as a script that was written for one process does."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

import torch

from overlap.core.bucket import Slot
from overlap.core.feature import Feature
from overlap.transport.communicator import Communicator
from overlap.transport.memory import values_of
from overlap.transport.objects import allgather_object

__all__ = ["SameData"]

log = logging.getLogger("dear")

_LOOKED_AT = 8  # gradients
_PIECE = 2**20  # elements that are converted at a time: a gradient may be as large as the memory that is left


class SameData(Feature):
    """Warns once, on the first of the ranks of `comm`, where the first gradients are bit for bit the same on all."""

    def __init__(self, comm: Communicator) -> None:
        self._comm, self._looked = comm, False

    def claims(self, slots: Sequence[Slot]) -> Collection[int]:
        """Compare the ranks' gradients, in the first call, when they are local still; claims nothing."""
        if not self._looked and self._comm.size > 1:
            self._looked = True
            found = allgather_object(self._comm, _fingerprint(slots))
            if self._comm.rank == 0 and found[0] and all(one == found[0] for one in found):
                log.warning(
                    "all %d ranks have computed the same gradients in the first step: is the data sharded? Each rank needs "
                    "its own part, as from torch.utils.data.DistributedSampler(dataset, dear.size(), dear.rank()) (this is "
                    "said once)",
                    self._comm.size,
                )
        return ()


def _fingerprint(slots: Sequence[Slot]) -> list[float]:
    """Sums over the first gradients; empty where there is none, or none that is not zero."""
    gradients = [slot.param.grad for slot in slots if slot.param.grad is not None][:_LOOKED_AT]
    sums = [_norm(values_of(gradient.detach())) for gradient in gradients]
    return sums if any(sums) else []


def _norm(values: torch.Tensor) -> float:
    wide = torch.complex128 if values.is_complex() else torch.float64
    pieces = values.reshape(-1).split(_PIECE)
    return float(torch.stack([torch.linalg.vector_norm(piece, dtype=wide) for piece in pieces]).norm())
