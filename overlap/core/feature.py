"""Interfaces of what may take part in a step: features, the policy of updates, and the placement of state.

Core calls these moments, and knows nobody who listens by name.

    a plan        claims ─▶ admit ─▶ planned               all ranks
    backward      gradient … filled                        this rank: nothing that communicates
    a call        verify                                   this rank: may raise, then all ranks raise
                  news                                     this rank: whether it has something to agree on in `closed`
                  digest                                   this rank: of what has to be the same where all step
                  told ─▶ difference                       all ranks, where digests differ: what to raise
                  closed                                   all ranks: all reductions of the round are issued
    an update     used                                     this rank
    the end       ended                                    this rank, of a round
                  ending                                   this rank, of training

`overlap.optimizer.assembly` says which features an optimizer has. One that has none runs none of this.

Two things are replaced, and not only listened to. Each optimizer has exactly one of both: a :class:`Policy`, when updates
run, and a :class:`StatePlacement`, what becomes of the optimizer's state.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from overlap.core.bucket import Bucket, Slot
from overlap.core.shards import ShardUpdate

__all__ = ["Feature", "Policy", "StatePlacement", "listeners"]


class Feature:
    """An optional part of a step; override what is needed, since core calls nothing that is not overridden."""

    def claims(self, slots: Sequence[Slot]) -> Collection[int]:
        """Indices of those of `slots` that this feature reduces itself. They get no bucket. The same on every rank."""
        return ()

    def admit(self, slots: Sequence[Slot]) -> None:
        """`slots` are about to get buckets: raise, on every rank, where they cannot."""

    def planned(self, order: Sequence[Bucket]) -> None:
        """These are the buckets from now on."""

    def gradient(self, slot: Slot) -> None:
        """A gradient was accumulated into ``slot.param.grad``, before anything is done with it."""

    def filled(self, bucket: Bucket) -> None:
        """All of its gradients came in backward: it is about to be reduced."""

    def verify(self) -> None:
        """A call of the script's closes the round: raise where gradients are not what backward left."""

    def news(self) -> bool:
        """A call of the script's closes the round: whether this rank alone knows of something that all should agree on."""
        return False

    def digest(self) -> int:
        """A step: a number from 0 to 2^56 - 1 that is the same wherever what has to be the same is; on ranks that train."""
        return 0

    def told(self) -> Any:
        """Digests differ: what :meth:`difference` compares, of this rank. It can be pickled."""

    def difference(self, told: Mapping[int, Any]) -> str:
        """What differs in what ranks have `told`, as a message; empty where nothing does (pure)."""
        return ""

    def closed(self, news: bool, leader: Callable[[], int], factor: Callable[[], float]) -> None:
        """All reductions of the round are issued.

        Args:
            news: some rank has some, see :meth:`news`.
            leader: gives the first rank (of the communicator) that contributes.
            factor: what averages over all ranks are multiplied by to be those of the ranks that contribute; known once
                any reduction of the round is done.
        """

    def used(self, buckets: Sequence[Bucket]) -> None:
        """Parameters are updated by the averages in `buckets`. Not told where a GradScaler has looked. This rank."""

    def ending(self) -> None:
        """Training ends, in ``shutdown()``. This rank."""

    def ended(self) -> None:
        """The round is over: its gradients were used, or dropped."""


def listeners(features: Iterable[Feature], moment: str) -> tuple[Callable[..., Any], ...]:
    """The method `moment` of each feature that overrides it."""
    plain = getattr(Feature, moment)
    return tuple(getattr(feature, moment) for feature in features if getattr(type(feature), moment) is not plain)


class Policy:
    """Decides when updates run; this one, the default, inside ``step()``. Exactly one for each optimizer."""

    #: A gradient of a bucket may be a moment to update another one: see :meth:`gradient`.
    early = False
    #: Updates are left for after ``step()``, bucket by bucket.
    defers = False

    def planned(self, order: Sequence[Bucket], shards: ShardUpdate | None, reread: Iterable[Slot]) -> None:
        """These are the buckets from now on; parameters of `reread` may be read in backward after their gradients."""

    def gradient(self, bucket: Bucket) -> None:
        """A gradient of `bucket` is there. Only if `early`; on this rank."""

    def read(self, slot: Slot) -> None:
        """A parameter is about to be handed out. Only if `early`; on this rank."""

    def check(self) -> None:
        """In a call that closes the round: raise where parameters were updated in a way that the script has changed."""

    def refuse(self, what: str) -> None:
        """Raise where `what` cannot be done between backward and ``step()``, since parameters are updated there."""

    def refuse_drop(self) -> None:
        """The gradients of this round are about to be dropped: raise where they have updated parameters."""

    def begin(self) -> Collection[Bucket]:
        """In ``step()``, on every rank: returns the buckets that are updated already."""
        return ()

    def leave(self, order: Sequence[Bucket]) -> bool:
        """In ``step()``, on every rank, instead of all updates: whether they are left to whoever needs parameters."""
        return False

    def arrive(self) -> None:
        """Make the updates that were left. On this rank."""

    def watched(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """`step`, the optimizer's own, or what looks on where it updates whole parameters."""
        return step


class StatePlacement(Protocol):
    """Moves the optimizer's state where buckets come and go; core itself does not look into it."""

    def placed(self, shards: ShardUpdate, bucket: Bucket) -> None:
        """`shards` have taken on the pieces of a new `bucket`: they get their parts of the state. On every rank."""

    def moved(self, order: Iterable[Bucket], old: ShardUpdate, new: ShardUpdate) -> None:
        """`new` takes over from `old`, whose buckets are those of `order`. On every rank, which it may wait for."""

    def updating(self) -> AbstractContextManager[None]:
        """Around every update of the state, or of who holds which part of it."""
        return nullcontext()
