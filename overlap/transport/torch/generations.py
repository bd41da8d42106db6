"""Decides which ranks train together next, once ranks are lost or come back (pure).

A process is known by its :class:`Member`. Those that train together are a generation. The next one has who is left of the
last, in its order, so that one of them has rank 0 and knows where training is; behind them whoever has come meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

__all__ = ["Member", "is_over", "next_generation"]


class Member(NamedTuple):
    """A process that an agent has started as `rank` of the job, after `attempt` earlier ones."""

    rank: int
    attempt: int

    def __str__(self) -> str:
        return f"{self.rank}.{self.attempt}"

    @classmethod
    def of(cls, text: str) -> Member:
        """The member that a text, made by ``str()``, describes."""
        rank, attempt = text.split(".")
        return cls(int(rank), int(attempt))


def next_generation(
    last: Sequence[Member], alive: Collection[Member], ready: Collection[Member], size: int
) -> list[Member] | None:
    """The members, in the order of their ranks, of the generation after `last`; None while somebody is waited for.

    `alive` are those that are neither lost nor have ended; of these, `ready` ones wait for it. All that are left of `last`
    have to be. Where nobody is, as in the beginning, as many have to come as the job was started with: `size`.
    """
    left = [member for member in last if member in alive]
    waiting = sorted(member for member in ready if member in alive and member not in last)
    newest = {member.rank: member for member in waiting}  # sorted: of one rank, the last attempt
    if left:
        return [*left, *newest.values()] if all(member in ready for member in left) else None
    return list(newest.values()) if len(newest) == size else None


def is_over(last: Sequence[Member], ended: Collection[Member]) -> bool:
    """Whether training has ended without those that wait: whoever was left of `last` has `ended`."""
    return any(member in ended for member in last)
