"""Plans and the facts they are made from: frozen values, the same on every rank (pure)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from overlap.plan.partition import BucketSpec

__all__ = ["Facts", "Plan", "Updates"]


@dataclass(frozen=True, slots=True)
class Facts:
    """The observations of the first iteration, as slot indices, and how often each gradient was accumulated in it."""

    units: tuple[tuple[int, ...], ...]  # in the order of first use in forward, grouped by layer
    arrivals: tuple[int, ...]  # in the order in which gradients were complete
    fires: tuple[int, ...]  # by slot
    unseen: frozenset[int]  # got a gradient though no module handed them out: awaited when any forward starts
    idle: frozenset[int]  # got no gradient
    reread: frozenset[int] = frozenset()  # read in backward after their gradient was complete
    moments: tuple[float, ...] = ()  # by slot: when its gradient was complete, in seconds after the first one's


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan: buckets in order of issue, and which of them hold parameters and are updated in shards."""

    buckets: tuple[BucketSpec, ...]
    sharded: tuple[bool, ...]


class Updates(Enum):
    """A strategy's wish for how parameters are updated; :func:`feasible` says what optimizer and compression allow."""

    WHOLE = auto()  # in step(), all of them by every rank
    SHARDED = auto()  # in step(), each shard by its owner, who sends it to the others
    OWNED = auto()  # as SHARDED, with shards that end where parameters do: whole parameters, each by its owner
    EAGER = auto()  # each shard by its owner, in the order of issue while backward still runs: `overlap.features.early`
    DEFERRED = (
        auto()
    )  # after step(), by every rank, bucket by bucket when somebody needs them: `overlap.features.deferred`

    @property
    def in_shards(self) -> bool:
        """Whether buckets hold parameters, of which each rank owns a shard."""
        return self in (Updates.SHARDED, Updates.OWNED, Updates.EAGER)
