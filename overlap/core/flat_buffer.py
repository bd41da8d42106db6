"""Flat memory for the tensors of a bucket: all of them, and this rank's share; rounded, with exact values behind it.

`overlap.features.rounded_parameters` implements the latter.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable
from typing import Protocol

import torch

from overlap.plan.partition import BucketSpec
from overlap.transport.cut_pickles import cut_when_pickled
from overlap.transport.memory import view_like

__all__ = ["FlatBuffer", "MakeMaster", "MasterWeights"]

_LARGE_PAGE = 2**21


class FlatBuffer:
    """The tensors of a bucket, laid out as `spec` says, in `whole`; the elements `own` of it, which are this rank's, in
    `shard`.

    1-D tensors of one type, zeros at first. `shard` shows the memory of `whole`, unless it is to lie `apart`. A buffer of
    the host that is `freed` gives its pages back between uses, and keeps its address.
    """

    __slots__ = ("_pages", "own", "shard", "spec", "there", "whole")

    def __init__(
        self,
        spec: BucketSpec,
        own: slice,
        dtype: torch.dtype,
        device: torch.device,
        *,
        apart: bool = False,
        freed: bool = False,
    ) -> None:
        self.spec, self.own = spec, own
        self.there = True  # `whole` has memory
        self._pages: mmap.mmap | None = None
        if freed:
            self._pages, start = _pages(spec.padded_numel * dtype.itemsize)
            self.whole = torch.frombuffer(self._pages, dtype=dtype, count=spec.padded_numel, offset=start)
        else:
            self.whole = torch.zeros(spec.padded_numel, dtype=dtype, device=device)
        cut_when_pickled(self.whole)
        self.shard = torch.zeros(own.stop - own.start, dtype=dtype, device=device) if apart else self.whole[own]

    def view(self, place: int, like: torch.Tensor) -> torch.Tensor:
        """The tensor at `place` of the bucket, shaped and laid out as `like`; see :func:`view_like`."""
        return view_like(self.whole, self.spec.offsets[place], like)

    def free(self) -> None:
        """Give back the pages of `whole`, which reads as zeros then, until :meth:`restore`."""
        assert self._pages is not None, "only a freed buffer has pages of its own"
        self._pages.madvise(mmap.MADV_DONTNEED)
        self.there = False

    def restore(self) -> None:
        """Let `whole` be written to again: it takes pages as that happens."""
        self.there = True

    def release(self) -> None:
        """Give up the memory, for good."""
        self.whole = self.shard = self.whole.new_empty(0)
        self._pages = None


class MasterWeights(Protocol):
    """The exact shard of a bucket whose parameters travel, and are used, rounded to 16 bits."""

    values: torch.Tensor  # exact: what an update writes to
    wire: torch.Tensor  # all ranks' shards, as they travel

    def follow(self) -> None:
        """Before an update, take over what a script has written to the parameters."""

    def pack(self) -> None:
        """After the update, round `values` into this rank's part of `wire`."""

    def land(self) -> None:
        """Make the shards in `wire`, all of which have arrived, the parameters."""

    def put(self, piece: torch.Tensor, values: torch.Tensor) -> None:
        """Replace the exact values of `piece`, a view of `values`."""

    def forget(self) -> None:
        """Forget the exact values, which are not known any more: the parameters are taken instead."""


#: From a bucket's flat parameters, and this rank's shard of them.
MakeMaster = Callable[[torch.Tensor, slice], MasterWeights]


def _pages(nbytes: int) -> tuple[mmap.mmap, int]:
    """Zeros beside the C library's heap, where memory that comes and goes would leave holes, and where in it they begin.

    In large pages where those fit: pages are zeroed each time they are taken, and a large one in a tenth of the time.
    """
    spare = _LARGE_PAGE if nbytes >= _LARGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE") else 0
    pages = mmap.mmap(-1, nbytes + spare, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if not spare:
        return pages, 0
    with contextlib.suppress(OSError):  # a kernel without them
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages, -torch.frombuffer(pages, dtype=torch.uint8).data_ptr() % _LARGE_PAGE
