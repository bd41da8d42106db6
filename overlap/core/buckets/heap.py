"""Returns freed memory to the kernel that the C library would keep, and keeps its heap free of what stays for ever."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from pathlib import Path

__all__ = ["Freed", "Holes", "give_back", "keep_apart"]

_OFTEN = 16 * 2**20  # bytes; a look through the heap takes a millisecond

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
_option = getattr(ctypes.CDLL(None), "mallopt", None)
_mincore, _sbrk = getattr(ctypes.CDLL(None), "mincore", None), getattr(ctypes.CDLL(None), "sbrk", None)
if _mincore is not None and _sbrk is not None:
    _mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    _sbrk.argtypes, _sbrk.restype = [ctypes.c_ssize_t], ctypes.c_size_t
_PAGE = mmap.PAGESIZE
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1
_SMALL, _LARGE = 2**17, 2**25  # bytes: glibc's first threshold, and the one that it adapts to large tensors
_SETTINGS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")


def give_back() -> None:
    """Return the heap's unused pages to the kernel, also those in the middle of the heap. Nothing without glibc.

    glibc gives back the end of its heap by itself, or not, as its environment variables say, and holes never.
    """
    if _trim is not None:
        _trim(0)


def keep_apart(apart: bool) -> None:
    """From now on, give large blocks pages of their own (`apart`), or take them from the heap.

    What stays while training goes on, made between two passes, would lie among the gradients that backward leaves behind:
    these would not find their old places any more, and the heap would grow by their size. Nothing without glibc, and
    nothing where its environment variables say how large is.
    """
    if _option is not None and not any(name in os.environ for name in _SETTINGS):
        _option(_MMAP_THRESHOLD, _SMALL if apart else _LARGE)
        _option(_TRIM_THRESHOLD, 2 * (_SMALL if apart else _LARGE))


class _Info(ctypes.Structure):
    """glibc's ``struct mallinfo2``, since 2.33."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


_info = getattr(ctypes.CDLL(None), "mallinfo2", None)
if _info is not None:
    _info.restype = _Info


class Holes:
    """Bounds the memory of holes in the heap.

    A gradient leaves a hole, from which small blocks are cut. The next gradient, of the same size, does not fit in any
    more, and takes new memory: so the heap may grow by all gradients of a backward pass.
    """

    def __init__(self) -> None:
        self._empty = 0  # bytes of holes that have no pages, at least
        self._heap = _heap()

    def bound(self, room: int, *, exact: bool = False) -> None:
        """Return holes to the kernel where they have more than `room` bytes of memory. Takes some microseconds.

        Holes that got pages again since, as another gradient was in them, count where it is `exact`: the kernel is asked,
        which takes some 100 microseconds for each 200 MB of heap.
        """
        if _info is None:
            return
        free = int(_info().fordblks)
        self._empty = min(_without_pages(self._heap), free) if exact else min(self._empty, free)
        if free - self._empty > room:
            give_back()
            self._empty = int(_info().fordblks)


def _heap() -> int:
    """The address at which the C library's heap begins; 0 where Linux does not say."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return 0
    found = re.search(r"^([0-9a-f]+)-.*\[heap\]$", maps, re.MULTILINE)
    return 0 if found is None else int(found[1], 16)


def _without_pages(start: int) -> int:
    """Bytes of the heap from `start` on that have no memory."""
    if not start or _mincore is None or _sbrk is None:
        return 0
    pages = (_sbrk(0) - start) // _PAGE
    found = ctypes.create_string_buffer(max(pages, 1))
    if pages <= 0 or _mincore(start, pages * _PAGE, found):
        return 0
    return found.raw.count(b"\0") * _PAGE


class Freed:
    """A context that returns memory to the kernel while many tensors are replaced by large buffers, and at the end.

    The tensors leave holes among what else is on the heap, and no buffer fits into one: a process would need the memory
    twice.
    """

    def __init__(self) -> None:
        self._nbytes = 0

    def __enter__(self) -> Freed:
        return self

    def __exit__(self, *_: object) -> None:
        if self._nbytes:
            give_back()

    def more(self, nbytes: int) -> None:
        """Note that `nbytes` of host memory were freed."""
        self._nbytes += nbytes
        if self._nbytes >= _OFTEN:
            self._nbytes = 0
            give_back()
