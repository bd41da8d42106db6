"""Keeps track of which parameters are averaged in a round, and whether the values of the others are the script's.

On every rank alike, but for what is written.

[Note: whose a frozen parameter is]
For one that was trained in the round before, the average on its way brings something, which it takes over at the end of
the first round that it is frozen in. From then on, and before where it is written to, it is the script's: at every event
the buffer takes its value over and never the other way. Which parameters travel depends on what is trained, never on what
is written, so that ranks agree; but ``average_parameters()`` asks all ranks what was written, and averages that.

Whether anything was written to parameters meanwhile, where nobody keeps the values that they had.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from co2.part import Part
from co2.schedule import Event
from overlap.core.bucket import Slot

__all__ = ["AveragedParameters", "Batch", "Versions"]


Batch = tuple[int, ...]  # slots that were taken in together, on which the parts depend


class AveragedParameters:
    """The parameters that were trained at least once, as indices into `slots`, a list that may grow."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = slots
        self.batches: list[Batch] = []
        self._known: set[int] = set()
        self._active: set[int] = set()  # those that were trained since the last event
        self._coming: frozenset[int] = frozenset()  # those for which the last round may bring something
        self._versions: Versions | None = (
            None  # of those, since the last event; None once a state was loaded, until a step
        )

    @property
    def known(self) -> list[int]:
        """All slots that were taken in."""
        return sorted(self._known)

    def travelling(self, idle: frozenset[int]) -> list[str]:
        """What ranks compare: the names of all slots that were taken in, and of those that travel (not `idle`)."""
        taken_in = [self._slots[index].name for batch in self.batches for index in batch]
        return [*taken_in, *(f"{self._slots[index].name}, trained" for index in sorted(self._known - idle))]

    @property
    def idle(self) -> frozenset[int]:
        """The slots that were not trained since the last event."""
        return frozenset(self._known - self._active)

    def fresh(self, trained: Collection[int]) -> Batch:
        """The slots of `trained` that were not taken in yet, in their order."""
        return tuple(index for index in trained if index not in self._known)

    def take_in(self, batch: Batch) -> None:
        """Note that `batch` has a place in the parts now."""
        self.batches.append(batch)
        self._known.update(batch)

    def train(self, trained: Collection[int]) -> None:
        """Note that a step of `trained` begins, all of which are taken in."""
        if self._versions is None:
            self._versions = self._stamped(self._coming)
        self._active.update(trained)

    def close(self, event: Event, idle: frozenset[int], among: frozenset[int]) -> None:
        """End a round or an average of the slots `among`, but for `idle` ones; all other slots go on as they were."""
        self._active -= among
        coming = among - idle if event is Event.ROUND else frozenset()
        self._coming = (self._coming - among) | coming
        kept = self._versions if self._versions is not None else Versions()
        self._versions = kept.renewed(among, self._stamped(coming))

    # - Whose they are

    def _stamped(self, indices: Iterable[int]) -> Versions:
        return Versions(self._slots[index] for index in indices)

    def _overwritten(self) -> frozenset[int]:
        """Those for which something is on its way, and to which something was written since the last event."""
        versions = self._versions
        return frozenset(i for i in self._coming if versions is not None and versions.differs(self._slots[i]))

    def kept(self, idle: frozenset[int]) -> frozenset[int]:
        """The `idle` slots whose values are the script's."""
        return idle - (self._coming - self._overwritten())

    @property
    def arriving(self) -> frozenset[int]:
        """The slots for which an average is in flight, except those whose values are the script's."""
        return self._coming - self.kept(self.idle)

    def written_in(self, parts: Iterable[Part]) -> frozenset[int]:
        """The idle slots to which the script has written, and whose values are its own. With no round on its way.

        Where it wrote before the average in flight came, that comes too late.
        """
        theirs = self.idle - self._coming
        return (self.idle & self._overwritten()).union(*(part.written(theirs) for part in parts))

    # - State

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps; see :meth:`load`."""
        return {
            "batches": [list(batch) for batch in self.batches],
            "active": sorted(self._active),
            "coming": sorted(self.arriving),
        }

    def load(self, section: dict[str, Any]) -> None:
        """Restore the rest of what :meth:`state` gave, once all batches are taken in."""
        self._active = set(section["active"])
        self._coming = frozenset(section.get("coming", self._known))


class Versions:
    """Version stamps of `slots`, which show later whether somebody wrote to them.

    What is written through ``.data`` leaves none, unless it is put in place of the old.
    """

    def __init__(self, slots: Iterable[Slot] = ()) -> None:
        self._seen = {slot.index: _stamp(slot) for slot in slots}

    def renewed(self, indices: Collection[int], now: Versions) -> Versions:
        """These stamps, with those of the slots `indices` taken from `now`, or dropped."""
        merged = Versions()
        merged._seen = {i: seen for i, seen in self._seen.items() if i not in indices} | now._seen
        return merged

    def differs(self, slot: Slot) -> bool:
        """Whether the slot was written to since it was stamped. Never so of a slot that was not stamped."""
        seen = self._seen.get(slot.index)
        return seen is not None and seen != _stamp(slot)


def _stamp(slot: Slot) -> tuple[int, int]:
    return slot.param.data_ptr(), slot.param._version
