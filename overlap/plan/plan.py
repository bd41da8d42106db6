"""Plans and the facts they are made from: frozen values, the same on every rank (pure)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from overlap.plan.partition import BucketSpec
from overlap.transport.operation import Collective

__all__ = [
    "BucketPlan",
    "Facts",
    "Placement",
    "Plan",
    "Residency",
    "Updates",
    "leads",
    "placed",
    "replicated",
]


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


class Placement(Enum):
    """Where the ranks have values that belong to all of them."""

    PARTIAL = auto()  # every rank has a summand of each value
    REPLICATED = auto()  # every rank has all values
    SHARD = auto()  # every rank has its share
    OWNED = auto()  # one rank has all values


class Residency(Enum):
    """How long a rank has whole parameters of a bucket that is sharded."""

    KEPT = auto()  # always
    HOST = auto()  # always: they lie once in each host's memory, to which each rank writes its share of updates
    FREED = auto()  # while a pass uses them: they are gathered ahead of that (`overlap.plan.sweeps`)
    SHARDED_POST_FORWARD = (
        auto()
    )  # the same; for backward within a group of ranks, which have kept shares since forward
    FREED_AFTER_BACKWARD = auto()  # from their use in forward to that in backward
    FREED_IN_STEP = auto()  # from their first use after a step to the next step, in all passes
    FREED_IN_STEP_ON_HOST = auto()  # the same, and they lie once in each host's memory, which its ranks fill together


_LEADS = {
    (Placement.PARTIAL, Placement.REPLICATED): Collective.ALL_REDUCE,
    (Placement.PARTIAL, Placement.SHARD): Collective.REDUCE_SCATTER,
    (Placement.PARTIAL, Placement.OWNED): Collective.REDUCE,
    (Placement.SHARD, Placement.REPLICATED): Collective.ALL_GATHER,
    (Placement.OWNED, Placement.REPLICATED): Collective.BROADCAST,
}


def leads(before: Placement, after: Placement) -> Collective:
    """The operation that makes values placed as `before` lie as `after`. Raises ``ValueError`` where none does."""
    found = _LEADS.get((before, after))
    if found is None:
        raise ValueError(f"no operation leads from {before.name} to {after.name}")
    return found


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """One bucket: its tensors and their places (`spec`), where its values lie, and how long it is whole.

    `placement` is that of averaged gradients, of what updates them, and of updated parameters. Gradients of backward are
    ``PARTIAL``, and forward reads parameters that are ``REPLICATED``.
    """

    spec: BucketSpec
    placement: Placement = Placement.REPLICATED
    residency: Residency = Residency.KEPT

    @property
    def sharded(self) -> bool:
        """Whether a rank updates its share only, and updated parameters are gathered."""
        return self.placement is not Placement.REPLICATED

    @property
    def freed(self) -> bool:
        """Whether this rank has its share only, between uses."""
        return self.sharded and self.residency not in (Residency.KEPT, Residency.HOST)

    @property
    def on_host(self) -> bool:
        """Whether the ranks of a host have one copy of whole parameters together."""
        return self.sharded and self.residency is Residency.HOST

    @property
    def frees_gradients(self) -> bool:
        """Whether whole gradients have memory only until they are reduced."""
        return self.freed or self.on_host

    @property
    def owner(self) -> int | None:
        """The rank that has all values, where one has."""
        if self.placement is not Placement.OWNED:
            return None
        assert self.spec.counts is not None, "the shares of an owned bucket are not equal"
        return self.spec.counts.index(max(self.spec.counts))


#: The buckets, in order of issue.
Plan = tuple[BucketPlan, ...]


def placed(
    specs: Iterable[BucketSpec],
    shardable: Sequence[bool],
    placement: Placement = Placement.SHARD,
    residency: Callable[[BucketSpec], Residency] = lambda _spec: Residency.KEPT,
) -> Plan:
    """Buckets that lie as `placement` where their tensors are `shardable`, and are replicated elsewhere."""
    return tuple(
        BucketPlan(spec, placement, residency(spec)) if shardable[spec.tensors[0]] else BucketPlan(spec)
        for spec in specs
    )


def replicated(specs: Iterable[BucketSpec]) -> Plan:
    """Buckets that every rank updates in full."""
    return tuple(map(BucketPlan, specs))


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
