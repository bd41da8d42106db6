"""Flat memory for the tensors of a bucket: all of them, and this rank's share."""

from __future__ import annotations

import contextlib
import mmap

import torch

from overlap.plan.partition import BucketSpec
from overlap.transport.cut_pickles import cut_when_pickled
from overlap.transport.memory import view_like

__all__ = ["FlatBuffer"]

_LARGE_PAGE = 2**21


class FlatBuffer:
    """The tensors of a bucket, laid out as `spec` says, in `whole`; the elements `own` of it, which are this rank's, in
    `shard`.

    1-D tensors of one type, zeros at first. `shard` shows the memory of `whole`, unless it is to lie `apart`. A buffer of
    the host that is `freed` has both on pages of their own; it gives those of `whole` back between uses, and keeps its
    address.
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
            self.whole, self._pages = _on_pages(spec.padded_numel, dtype)
        else:
            self.whole = torch.zeros(spec.padded_numel, dtype=dtype, device=device)
        cut_when_pickled(self.whole)
        self.shard = self.whole[own]
        if apart:
            numel = own.stop - own.start
            self.shard = _on_pages(numel, dtype)[0] if freed else torch.zeros(numel, dtype=dtype, device=device)

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


def _on_pages(numel: int, dtype: torch.dtype) -> tuple[torch.Tensor, mmap.mmap]:
    pages, start = _pages(max(numel, 1) * dtype.itemsize)
    return torch.frombuffer(pages, dtype=dtype, count=max(numel, 1), offset=start)[:numel], pages


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
