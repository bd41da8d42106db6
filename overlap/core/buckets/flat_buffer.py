"""Flat memory for the tensors of a bucket: all of them, and this rank's share."""

from __future__ import annotations

import contextlib
import mmap

import torch

from overlap.plan.partition import BucketSpec
from overlap.transport.cuda import streams
from overlap.transport.cuda.memory import DeviceMemory, pinned
from overlap.transport.cut_pickles import cut_when_pickled
from overlap.transport.memory import view_like

__all__ = ["FlatBuffer"]

_LARGE_PAGE = 2**21


class FlatBuffer:
    """The tensors of a bucket, laid out as `spec` says, in `whole`; the elements `own` of it, which are this rank's, in
    `shard`.

    1-D tensors of one type, zeros at first. `shard` shows the memory of `whole`, unless it is to lie `apart`. `memory`,
    where it is given, is that of `whole`.

    A buffer that is `freed` gives the memory of `whole` back between uses. On the host both are on pages of their own:
    `whole` keeps its address, and reads as zeros then. On a device `whole` and all tensors over it read nothing then, and
    none can be made; with `zeros`, it has zeros whenever it is restored. `offloaded`: the shard, which is apart, lies in
    pinned memory of the host.
    """

    __slots__ = ("_device", "_pages", "offloaded", "own", "shard", "spec", "there", "whole")

    def __init__(
        self,
        spec: BucketSpec,
        own: slice,
        dtype: torch.dtype,
        device: torch.device,
        *,
        apart: bool = False,
        freed: bool = False,
        memory: torch.Tensor | None = None,
        zeros: bool = False,
        offloaded: bool = False,
    ) -> None:
        self.spec, self.own, self.offloaded = spec, own, offloaded
        self.there = True  # `whole` has memory
        self._pages: mmap.mmap | None = None
        self._device: DeviceMemory | None = None
        on_device = streams.on_device(torch.empty(0, device=device))
        on_pages = freed and not on_device
        if memory is not None:
            self.whole = memory
        elif on_pages:
            self.whole, self._pages = _on_pages(spec.padded_numel, dtype)
        else:
            self.whole = torch.zeros(spec.padded_numel, dtype=dtype, device=device)
        if freed and on_device:
            self._device = DeviceMemory(self.whole, zeros=zeros)
        cut_when_pickled(self.whole)
        self.shard = self.whole[own]
        numel = own.stop - own.start
        if apart and offloaded:
            self.shard = pinned(numel, dtype, device)
        elif apart:
            self.shard = _on_pages(numel, dtype)[0] if on_pages else torch.zeros(numel, dtype=dtype, device=device)

    def view(self, place: int, like: torch.Tensor) -> torch.Tensor:
        """The tensor at `place` of the bucket, shaped and laid out as `like`; see :func:`view_like`."""
        return view_like(self.whole, self.spec.offsets[place], like)

    def placed(self) -> torch.Tensor:
        """This rank's share as it is gathered into `whole`: from where it is, or from its place there."""
        if not self.offloaded:
            return self.shard
        part = self.whole[self.own]
        part.copy_(self.shard)
        return part

    def free(self) -> None:
        """Give back the memory of `whole`, until :meth:`restore`."""
        if self._device is not None:
            self._device.free()
        else:
            assert self._pages is not None, "only a freed buffer has memory of its own"
            self._pages.madvise(mmap.MADV_DONTNEED)
        self.there = False

    def restore(self) -> None:
        """Let `whole` be used again, by what this thread computes next. On the host it takes pages as it is written to."""
        self.there = True
        if self._device is not None:
            self._device.take()

    def release(self) -> None:
        """Give up the memory, for good."""
        self.whole = self.shard = self.whole.new_empty(0)
        self._pages = self._device = None


def _on_pages(numel: int, dtype: torch.dtype) -> tuple[torch.Tensor, mmap.mmap]:
    pages, start = _pages(max(numel, 1) * dtype.itemsize)
    return torch.frombuffer(pages, dtype=dtype, count=max(numel, 1), offset=start)[:numel], pages


def _pages(nbytes: int) -> tuple[mmap.mmap, int]:
    """Zeros beside the C library's heap, where memory that comes and goes would leave holes, and where in it they begin.

    In large pages where those fit: pages are zeroed each time they are taken, and a large one in a tenth of the time. The
    rest behind them is in small ones: a large one there would be taken whole, and also for what the next mapping has.
    """
    spare = _LARGE_PAGE if nbytes >= _LARGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE") else 0
    pages = mmap.mmap(-1, nbytes + spare, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if not spare:
        return pages, 0
    start = -torch.frombuffer(pages, dtype=torch.uint8).data_ptr() % _LARGE_PAGE
    with contextlib.suppress(OSError):  # a kernel without them
        pages.madvise(mmap.MADV_HUGEPAGE, start, nbytes - nbytes % _LARGE_PAGE)
    return pages, start
