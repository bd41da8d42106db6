"""Communicators of all ranks beside the main one, so that operations whose mutual order nobody agreed on never meet.

An optimizer issues its buckets in one order everywhere, but *when* depends on which gradients a rank happens to have: a
parameter that only some ranks used is reduced under backward there and in ``step()`` elsewhere. Whatever else is
communicated in between, by the script or by another optimizer, comes before it on some ranks and after it on others.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from overlap.communicator import Communicator
from overlap.objects import allgather_object

__all__ = ["Channels"]


_MANY = 16  # channels, from which on it pays to look for dead owners in cycles
_LEASES_BETWEEN_COLLECTIONS = 8


class Channels:
    """Makes channels from `control`, tells `watch` of each, and ends them all.

    `abandoned` tells whom the script has dropped on this rank, by a name that is the same everywhere; `forget` lets go
    of one that all ranks have dropped. Until then it has to answer the others' questions, and owns its channels.
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
        self._leases = 0
        self._by_purpose: dict[str, Communicator] = {}
        self._leased: list[Communicator] = []
        self._owners: list[weakref.ref[Any] | None] = []

    def named(self, purpose: str) -> Communicator:
        """The channel that serves `purpose` alone. The first call for a purpose makes it, on every rank."""
        channel = self._by_purpose.get(purpose)
        if channel is None:
            channel = self._by_purpose[purpose] = self._make()
        return channel

    def lease(self, count: int) -> list[Communicator]:
        """Channels nobody uses; on every rank. :meth:`hold` says whose they are, until that owner dies.

        Owners die when garbage is collected, at different times on different ranks: a channel is leased again when all
        ranks find it free.
        """
        self._leases += 1
        if len(self._leased) >= _MANY and self._leases % _LEASES_BETWEEN_COLLECTIONS == 0:
            gc.collect()
        free = {number for number, owner in enumerate(self._owners) if owner is None or owner() is None}
        answers = allgather_object(self._control, (free, self._abandoned()))
        for name in sorted(set.intersection(*(dropped for _, dropped in answers))):
            self._forget(name)
        agreed = sorted(set.intersection(*(numbers for numbers, _ in answers)))[:count]
        while len(agreed) < count:
            agreed.append(len(self._leased))
            self._leased.append(self._make())
            self._owners.append(None)
        return [self._leased[number] for number in agreed]

    def hold(self, channels: Sequence[Communicator], owner: object) -> None:
        """Those of `channels` that are leased belong to `owner` as long as that lives."""
        for number, channel in enumerate(self._leased):
            if any(channel is mine for mine in channels):
                self._owners[number] = weakref.ref(owner)

    def close(self) -> None:
        for channel in (*self._by_purpose.values(), *self._leased):
            channel.close()

    def _make(self) -> Communicator:
        channel = self._control.split(0, self._control.rank)
        assert channel is not None, "every rank has the same colour"
        self._watch(channel)
        return channel
