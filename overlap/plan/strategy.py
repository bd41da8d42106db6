"""The interface of a strategy: what it decides about communication; everything else is shared."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Sequence
from typing import Any, Protocol

import torch

from overlap.job.groups import ShardGroups
from overlap.plan.partition import BucketSpec, TensorSpec
from overlap.plan.plan import Facts, Plan, Residency, Updates
from overlap.plan.simulation.events import Run
from overlap.plan.simulation.network import Medium
from overlap.plan.simulation.workload import Bucket, Workload
from overlap.plan.tuning.space import Dimension, Setting
from overlap.transport.communicator import Communicator

__all__ = ["Collectives", "PlannedStrategy", "Strategy"]


class Collectives(Protocol):
    """Issues the operations of buckets. Each sets ``bucket.work``, and waits for nothing."""

    def reduce(self, comm: Communicator, bucket: Any, /) -> None:
        """Issue the reduction of ``bucket.outgoing`` of all ranks into ``bucket.incoming`` with ``bucket.op``.

        Of a bucket that holds parameters, a rank needs its shard; `incoming` has its size. Otherwise `incoming` is
        whole and may be `outgoing` itself.
        """

    def gather(self, comm: Communicator, bucket: Any, /) -> bool:
        """Issue the all-gather of the updated parameters of a sharded bucket, ``bucket.travelling``.

        Returns whether somebody else has a tensor over the parameters, for which no gate waits.
        """


class Strategy(ABC):
    """One schedule of communication: a pure plan.

    `updates` is what the strategy wishes for; optimizers that need whole parameters get whole updates. Without `ordered`,
    buckets are reduced as they fill, and the strategy's collectives see to one order on all ranks; not with updates in
    shards, whose last bucket waits for ``step()``. With a `gather_dtype`, updated parameters travel and are used rounded to
    it, and exact ones are kept in shards (`overlap.features.rounded_parameters`); with a `param_dtype`, those of freed
    buckets are of that type while they are used. Nothing here may depend on anything measured or seen on this rank alone.
    """

    name: str
    updates: Updates = Updates.WHOLE
    ordered: bool = True
    gather_dtype: torch.dtype | None = None
    param_dtype: torch.dtype | None = None
    lanes: int = (
        1  # of updates in shards: how many buckets travel at a time, see :func:`overlap.plan.partition.lane_of`
    )
    carries: bool = False  # hands `wide_gradients` and `wide_parameters` of buckets on to the communicator
    learns: bool = True  # plans after the first iteration; else when it is made, from the order of the model's modules
    whole_mb: float | None = None  # of freed buckets, how much may be whole beside what is used; None: four of them
    offload: bool = (
        False  # of models on a device, shards of freed buckets lie in the host's memory, and are updated there
    )
    shard_group: ShardGroups = None  # among which ranks shards are divided, see `overlap.job.groups`
    post_forward_ranks: int | None = None  # so many of those gather parameters that are ``SHARDED_POST_FORWARD``
    two_level: ShardGroups = None  # within which groups, and between them, operations go; None: as the job decides
    on_host: bool = False  # whole parameters lie once in each host's memory: `Residency.HOST`
    some_on_host: bool = False  # those of some freed buckets may: `Residency.FREED_IN_STEP_ON_HOST`
    looks: bool = (
        False  # at its steps while training goes on, and may change buckets: see `overlap.features.replanning`
    )
    complete: bool = True  # False: parts of the communication are left out, for time breakdowns

    @property
    def collectives(self) -> Collectives | None:
        """The object that issues this strategy's operations; None: those of `overlap.core.wire`."""
        return None

    def residency(self, spec: BucketSpec) -> Residency:
        """How long a rank has whole parameters of a bucket, if that is sharded."""
        return Residency.HOST if self.on_host else Residency.KEPT

    @property
    def space(self) -> tuple[Dimension, ...]:
        """The dimensions that a tuner may vary; none, unless the strategy says otherwise."""
        return ()

    @property
    def setting(self) -> dict[str, float]:
        """The strategy's current value for each dimension of :attr:`space`."""
        return {}

    @property
    def conduct(self) -> Hashable:
        """What else decides how buckets travel; settings with the same plan and conduct are measured once."""
        return None

    @property
    def terms(self) -> dict[str, Any]:
        """Arguments that have to be the same on all ranks, and are compared when an optimizer is wrapped."""
        return {**self.setting}

    def at(self, setting: Setting) -> Strategy:
        """The same strategy with another setting; dimensions that it does not name stay."""
        raise NotImplementedError(f"strategy {self.name!r} has nothing to tune")

    def refuse_successor(self, other: Strategy) -> None:
        """Raise ``ValueError`` where `other` cannot take over while training goes on."""
        if other.updates is not self.updates:
            raise ValueError(
                f"replan() cannot go from strategy {self.name!r} to {other.name!r}, which updates parameters another way "
                f"({self.updates.name} and {other.updates.name}): wrap the optimizer again"
            )
        if other.shard_group != self.shard_group:
            raise ValueError(
                f"shard_group cannot change from {self.shard_group!r} to {other.shard_group!r} in replan(): wrap the "
                "optimizer again"
            )
        if other.on_host != self.on_host:
            raise ValueError(
                f"replan() cannot go from strategy {self.name!r} to {other.name!r}, of which one has parameters in the "
                "host's memory (residency='host'): wrap the optimizer again"
            )
        if other.gather_dtype is not self.gather_dtype:
            raise ValueError(
                f"gather_dtype cannot change from {self.gather_dtype} to {other.gather_dtype} in replan(): wrap the "
                "optimizer again"
            )

    def owners(self, numels: Sequence[int], loads: Sequence[int]) -> tuple[int, ...] | None:
        """The rank that updates all of each parameter, for parameters of `numels` elements in the order of their groups.

        Rank r owns ``loads[r]`` elements already. Who owns a parameter is decided once, when it comes into a bucket. None
        (and only then ``updates`` is not ``OWNED``): shards are cut anywhere.
        """
        return None

    @abstractmethod
    def plan(self, facts: Facts, specs: Sequence[TensorSpec], shardable: Sequence[bool], world_size: int) -> Plan:
        """Decide the buckets, the same on every rank. `shardable[i]`: may tensor i be updated by the owner of its shard?"""


class PlannedStrategy(Strategy):
    """A strategy of which a planner may choose settings, by simulation (`overlap.plan.choice`)."""

    @property
    @abstractmethod
    def planned(self) -> dict[str, float]:
        """The current values of what a planner chooses; empty where the user has chosen all of it."""

    @abstractmethod
    def at(self, setting: Setting) -> PlannedStrategy:
        """The same strategy with another setting, as :meth:`Strategy.at`, also of what is :attr:`planned`."""

    @property
    @abstractmethod
    def candidates(self) -> Sequence[PlannedStrategy]:
        """Settings to begin with."""

    @property
    @abstractmethod
    def neighbours(self) -> Sequence[PlannedStrategy]:
        """Settings near this one."""

    @property
    @abstractmethod
    def burden(self) -> tuple[float, ...]:
        """The cost of this setting besides time; of two that are equally fast, the lesser is chosen."""

    @abstractmethod
    def simulate(self, work: Workload, network: Medium, buckets: Sequence[Bucket], whole: Collection[int]) -> Run:
        """Simulate a step.

        `buckets`: nearest the input first; those at the places `whole` are updated in full by every rank.
        """
