"""Channels: communicators of all ranks besides the main one, for operations that follow orders of their own.

An optimizer issues its buckets in one order everywhere, but *when* depends on which gradients a rank happens to have: a
parameter that only some ranks used is reduced under backward there and in ``step()`` elsewhere. Whatever else is
communicated in between, by the script or by another optimizer, comes before it on some ranks and after it on others.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import comm_core
from overlap.job.levels import Levels
from overlap.transport.communicator import Communicator
from overlap.transport.native import NativeCommunicator
from overlap.transport.objects import allgather_object

__all__ = ["Channels", "even"]


_MANY = 16  # channels, from which on it pays to look for dead owners in cycles


def even(colors: Sequence[int], committed: Sequence[int]) -> bool:
    """Whether ranks of the same colour have issued as much as one another; both by rank, no colours: one (pure)."""
    colors = colors or (0,) * len(committed)
    return len(set(zip(colors, committed, strict=True))) == len(set(colors))


@dataclass(eq=False)
class _Leased:
    channel: Communicator
    colors: tuple[int, ...]  # by rank: it connects those of this rank's colour; none for all
    levels: Levels | None  # groups of ranks that it knows
    owner: str | None = None  # None is free


class Channels:
    """Makes channels from `control`, and reports each to `watch`.

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
        self._leased: list[_Leased] = []

    def __len__(self) -> int:
        return len(self.all)

    @property
    def all(self) -> list[Communicator]:
        """Every channel, in the same order on all ranks."""
        return [*self._by_purpose.values(), *(leased.channel for leased in self._leased)]

    def named(self, purpose: str) -> Communicator:
        """The channel that serves `purpose` alone. The first call for a purpose makes it, on every rank."""
        channel = self._by_purpose.get(purpose)
        if channel is None:
            channel = self._by_purpose[purpose] = self._make()
        return channel

    def lease(self, count: int, colors: Sequence[int] = (), levels: Levels | None = None) -> list[Communicator]:
        """Lease channels that nobody uses; on every rank.

        :meth:`hold` says whose they are, until all ranks have dropped that owner.

        They connect all ranks, or those of one colour, by the `colors` of all ranks. With `levels`, they connect all, and
        know these groups. Leased twice before they are held they are the same.

        Where one rank has issued more than another, because a backward pass was broken off or a thread is not done yet,
        they are not used again: the next owner's operations would meet the last one's.
        """
        wanted = tuple(colors), levels
        if len(self._leased) >= _MANY and self._count_free(self._abandoned(), wanted) < count:
            gc.collect()  # optimizers die in cycles: schedulers replace their step()
        answers = allgather_object(
            self._control, (self._abandoned(), [leased.channel.committed for leased in self._leased])
        )
        counts = zip(*(committed for _, committed in answers), strict=True)
        fit = {leased for leased, committed in zip(self._leased, counts, strict=True) if even(leased.colors, committed)}
        for topic in sorted(set.intersection(*(topics for topics, _ in answers))):
            mine = [leased for leased in self._leased if leased.owner == topic]
            if mine and fit.issuperset(mine):
                self._forget(topic)
                for leased in mine:
                    leased.owner = None
        free = [
            each for each in self._leased if each.owner is None and each in fit and (each.colors, each.levels) == wanted
        ]
        while len(free) < count:
            free.append(_Leased(self._make(*wanted), *wanted))
            self._leased.append(free[-1])
        return [leased.channel for leased in free[:count]]

    def _count_free(self, dropped: set[str], wanted: tuple[Any, Any]) -> int:
        alike = (each for each in self._leased if (each.colors, each.levels) == wanted)
        return sum(each.owner is None or each.owner in dropped for each in alike)

    def hold(self, channels: Sequence[Communicator], owner: str) -> None:
        """Note that those `channels` that are leased belong to `owner`. On every rank."""
        for leased in self._leased:
            if any(leased.channel is mine for mine in channels):
                leased.owner = owner

    def _make(self, colors: Sequence[int] = (), levels: Levels | None = None) -> Communicator:
        """Without `colors`, of all ranks."""
        rank = self._control.rank
        if levels is not None:
            channel = levels.over(self._control)
            self._watch(channel)
            return channel
        alone = len(set(colors)) == len(colors) > 1  # every rank is
        color = None if alone else colors[rank] if colors else 0
        channel = self._control.split(color, rank) or NativeCommunicator(comm_core.local())
        self._watch(channel)
        return channel
