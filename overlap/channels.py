"""Communicators of all ranks beside the main one, so that operations whose mutual order nobody agreed on never meet.

An optimizer issues its buckets in one order everywhere, but *when* depends on which gradients a rank happens to have: a
parameter that only some ranks used is reduced under backward there and in ``step()`` elsewhere. Whatever else is
communicated in between, by the script or by another optimizer, comes before it on some ranks and after it on others.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

from overlap.communicator import Communicator
from overlap.objects import allgather_object

__all__ = ["Channels"]


_MANY = 16  # channels, from which on it pays to look for dead owners in cycles


class Channels:
    """Makes channels from `control`, and tells `watch` of each.

    `abandoned` tells whom the script has dropped on this rank, by a name that is the same everywhere. `forget` lets go of
    one that all ranks have dropped, with as much issued on its channels by each of them, so that whatever is in flight
    there will end. Until then it answers the others' questions, and its channels are its own.
    """

    def __init__(
        self,
        control: Communicator,
        watch: Callable[[Communicator], None],
        abandoned: Callable[[], set[str]],
        forget: Callable[[str], None],
    ) -> None:
        self._control, self._watch = control, watch
        self._abandoned, self._forget = abandoned, forget
        self._by_purpose: dict[str, Communicator] = {}
        self._leased: list[Communicator] = []
        self._owners: list[str | None] = []  # as long as the channels: None is free

    def __len__(self) -> int:
        return len(self.all)

    @property
    def all(self) -> list[Communicator]:
        """Every channel, in the same order on all ranks."""
        return [*self._by_purpose.values(), *self._leased]

    def named(self, purpose: str) -> Communicator:
        """The channel that serves `purpose` alone. The first call for a purpose makes it, on every rank."""
        channel = self._by_purpose.get(purpose)
        if channel is None:
            channel = self._by_purpose[purpose] = self._make()
        return channel

    def lease(self, count: int) -> list[Communicator]:
        """Channels nobody uses; on every rank. :meth:`hold` says whose they are, until all ranks have dropped that owner.

        Where one rank has issued more than another, because a backward pass was broken off or a thread is not done yet,
        they are not used again: the next owner's operations would meet the last one's.
        """
        if len(self._leased) >= _MANY and self._count_free(self._abandoned()) < count:
            gc.collect()  # optimizers die in cycles: schedulers replace their step()
        answers = allgather_object(self._control, (self._abandoned(), [channel.issued for channel in self._leased]))
        even = [len(set(issued)) == 1 for issued in zip(*(issued for _, issued in answers), strict=True)]
        for topic in sorted(set.intersection(*(topics for topics, _ in answers))):
            mine = [number for number, owner in enumerate(self._owners) if owner == topic]
            if mine and all(even[number] for number in mine):
                self._forget(topic)
                for number in mine:
                    self._owners[number] = None
        free = [number for number, owner in enumerate(self._owners) if owner is None and even[number]][:count]
        while len(free) < count:
            free.append(len(self._leased))
            self._leased.append(self._make())
            self._owners.append(None)
        return [self._leased[number] for number in free]

    def _count_free(self, dropped: set[str]) -> int:
        return sum(owner is None or owner in dropped for owner in self._owners)

    def hold(self, channels: Sequence[Communicator], owner: str) -> None:
        """Those of `channels` that are leased belong to `owner`. On every rank."""
        for number, channel in enumerate(self._leased):
            if any(channel is mine for mine in channels):
                self._owners[number] = owner

    def _make(self) -> Communicator:
        channel = self._control.split(0, self._control.rank)
        assert channel is not None, "every rank has the same colour"
        self._watch(channel)
        return channel
