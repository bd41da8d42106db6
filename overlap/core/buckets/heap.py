"""Returns freed memory to the kernel that the C library would keep."""

from __future__ import annotations

import ctypes

__all__ = ["Freed", "give_back"]

_OFTEN = 16 * 2**20  # bytes; a look through the heap takes a millisecond

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's


def give_back() -> None:
    """Return the heap's unused pages to the kernel, also those in the middle of the heap. Nothing without glibc.

    glibc gives back the end of its heap by itself, or not, as its environment variables say, and holes never.
    """
    if _trim is not None:
        _trim(0)


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
