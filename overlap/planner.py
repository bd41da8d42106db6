"""From what was learned to buckets: the agreed order of issue, and who owns which shard."""

from __future__ import annotations

from dataclasses import replace

import torch

from overlap.bucket import Bucket, Slot
from overlap.communicator import Communicator
from overlap.dense import is_dense
from overlap.observer import Facts
from overlap.partition import TensorSpec
from overlap.shard_update import ShardUpdate
from overlap.strategy import Plan, Strategy

__all__ = ["Planner"]


class Planner:
    """Builds the buckets of one optimizer into `order`, the agreed order of issue. It communicates nothing.

    Everything it decides from is the same on every rank: rank 0's facts, the slots, the strategy.
    """

    def __init__(
        self,
        comm: Communicator,
        optimizer: torch.optim.Optimizer,
        slots: list[Slot],
        strategy: Strategy,
        shards: ShardUpdate | None,
    ) -> None:
        self._comm, self._optimizer, self._slots = comm, optimizer, slots
        self.strategy, self.shards = strategy, shards
        self.order: list[Bucket] = []

    def begin(self, facts: Facts, passes: int) -> list[Bucket]:
        """The first buckets, from what the first iteration taught; returns those that no gate guards."""
        frozen = {slot.index for slot in self._slots if not slot.param.requires_grad and slot.param.grad is None}
        self._build(self.strategy.plan(_without(facts, frozen), *self._specs(), self._comm.size))
        for slot in self._slots:
            slot.expected = max(1, round(facts.fires[slot.index] / passes))
        outside = {self._slots[index].bucket for index in (*facts.unseen, *facts.idle)}
        return [bucket for bucket in self.order if bucket in outside and bucket.holds_parameters]

    def extend(self) -> list[Bucket]:
        """Buckets for parameters that were unfrozen or added since, issued last; returns those that no gate guards."""
        late = [slot for slot in self._slots if slot.bucket is None and slot.param.requires_grad]
        if not late:
            return []
        indices = tuple(slot.index for slot in late)
        nothing: frozenset[int] = frozenset()
        facts = Facts((indices,), indices, tuple(1 for _ in self._slots), nothing, nothing)
        before = len(self.order)
        self._build(self.strategy.plan(facts, *self._specs(), self._comm.size))
        return [bucket for bucket in self.order[before:] if bucket.holds_parameters]

    def _specs(self) -> tuple[list[TensorSpec], list[bool]]:
        specs, shardable = [], []
        for slot in self._slots:
            param = slot.param
            can_shard = self.shards is not None and is_dense(param.data)
            shardable.append(can_shard)
            kind = (str(param.dtype), str(param.device), can_shard)
            specs.append(TensorSpec(param.numel(), param.element_size(), kind))
        return specs, shardable

    def _build(self, plan: Plan) -> None:
        rank, size = self._comm.rank, self._comm.size
        for spec, sharded in zip(plan.buckets, plan.sharded, strict=True):
            members = [self._slots[index] for index in spec.tensors]
            number = len(self.order)
            bucket = Bucket(number, spec, members, rank=rank, world_size=size, holds_parameters=sharded)
            self.order.append(bucket)
            if sharded:
                assert self.shards is not None, "a strategy shards only what is shardable"
                self.shards.add(bucket, rank)
                self.shards.shard_state(bucket, self._optimizer.state)


def _without(facts: Facts, frozen: set[int]) -> Facts:
    """Facts about what can have gradients; frozen parameters get buckets when they are unfrozen."""
    return replace(
        facts,
        units=tuple(unit for unit in (tuple(i for i in u if i not in frozen) for u in facts.units) if unit),
        arrivals=tuple(index for index in facts.arrivals if index not in frozen),
        unseen=facts.unseen - frozen,
        idle=facts.idle - frozen,
    )
