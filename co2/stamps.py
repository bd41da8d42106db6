"""Whether anything was written to parameters meanwhile, where nobody keeps the values that they had."""

from __future__ import annotations

from collections.abc import Iterable

from overlap.core.bucket import Slot

__all__ = ["Stamps"]


class Stamps:
    """Of `slots`, as they are now. What is written through ``.data`` leaves none, unless it is put in place of the old."""

    def __init__(self, slots: Iterable[Slot] = ()) -> None:
        self._seen = {slot.index: _stamp(slot) for slot in slots}

    def differs(self, slot: Slot) -> bool:
        """Whether it was written to. Never so of a slot that was not stamped."""
        seen = self._seen.get(slot.index)
        return seen is not None and seen != _stamp(slot)


def _stamp(slot: Slot) -> tuple[int, int]:
    return slot.param.data_ptr(), slot.param._version
