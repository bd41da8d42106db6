"""Builds buckets from what was learned: the agreed order of issue, and which rank owns which shard."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial

from overlap.core.bucket import Bucket, Slot
from overlap.core.buckets.freed import FreedBucket
from overlap.core.buckets.heap import Freed
from overlap.core.buckets.host_bucket import HOST_COLLECTIVES, HostBucket
from overlap.core.feature import StatePlacement
from overlap.core.handles import outlives, shared
from overlap.core.master_weights import MakeMaster
from overlap.core.shards import ShardUpdate
from overlap.core.wire import COLLECTIVES, Exchange
from overlap.job.memory.host_memory import HostMemory
from overlap.plan.groups import Groups, members_of, plan_groups
from overlap.plan.partition import TensorSpec, lane_of
from overlap.plan.plan import BucketPlan, Facts, Plan, Updates
from overlap.plan.strategy import Strategy
from overlap.transport.communicator import Communicator
from overlap.transport.memory import is_dense

__all__ = ["Planner"]

log = logging.getLogger("dear")


class Planner:
    """Builds the buckets of one optimizer into `order`, the agreed order of issue. It communicates nothing.

    Everything it decides from is the same on every rank: rank 0's facts, the slots, the strategy. With `make_master`,
    parameters travel rounded. `host` makes the memory of what lies there; its ranks tell each other where.
    """

    def __init__(
        self,
        comm: Communicator,
        slots: list[Slot],
        strategy: Strategy,
        groups: Groups,
        shards: ShardUpdate | None,
        states: StatePlacement,
        exchange: Exchange,
        *,
        lanes: int,
        make_master: MakeMaster | None,
        sharers: Communicator | None = None,
        host: HostMemory | None = None,
    ) -> None:
        self._comm, self._sharers, self.slots = comm, comm if sharers is None else sharers, slots
        self._exchange, self._lanes, self._make_master, self._host = exchange, lanes, make_master, host
        self.strategy, self.shards, self._groups, self._states = strategy, shards, groups, states
        self.order: list[Bucket] = []
        self._facts: Facts | None = None  # about the parameters in buckets
        self._most = 1  # accumulations into one parameter in one backward pass
        self._unguarded: set[int] = set()  # slots that no gate is known to guard
        self._outlived: list[Slot] = []  # somebody has tensors over their old memory …
        self._told = False  # … which was said
        self._owners: dict[int, int] = {}  # by slot, of parameters that shards do not cut

    def begin(
        self, facts: Facts, fires: Sequence[int], passes: int, kept: Collection[int], *, fill: bool = True
    ) -> None:
        """Build the first buckets, from what the first iteration taught, and `fill` them with its gradients.

        Of frozen slots, those that are `kept` take part.

        `fires` are the most accumulations into each slot that any rank saw in `passes` backward passes. What none used may
        be used as often as the most used one: a gradient that is complete earlier waits for ``step()``, no more.
        """
        absent = {
            slot.index
            for slot in self.slots
            if slot.claimed or (not slot.param.requires_grad and slot.index not in kept)
        }
        self._facts = _without(facts, absent)
        self._unguarded = {*facts.unseen, *facts.idle}
        self.order += self._build(self.strategy, self.preview(self.strategy), self.shards, fill=fill)
        counts = [max(1, round(count / passes)) if count else 0 for count in fires]
        self._most = max(1, *counts)
        for slot, count in zip(self.slots, counts, strict=True):
            slot.expected = count or self._most

    def extend(self, slots: Sequence[Slot]) -> None:
        """Build buckets for `slots`, which were in none, to be issued last."""
        late = tuple(slot.index for slot in slots)
        if not late:
            return
        assert self._facts is not None, "learning comes first"
        self._find_owners(late)
        nothing: frozenset[int] = frozenset()
        unseen = frozenset(slot.index for slot in slots if not slot.held)
        facts = Facts((late,), late, tuple(1 for _ in self.slots), unseen, nothing)
        plan = self.strategy.plan(facts, *self._specs(), self._sharers.size)
        self.order += self._build(self.strategy, plan, self.shards, first=len(self.order), fill=True)
        self._facts = _with_late(self._facts, late, len(self.slots))
        for index in late:
            self.slots[index].expected = self._most
        self._unguarded.update(late)

    def draft(self, strategy: Strategy) -> tuple[list[Bucket], ShardUpdate | None]:
        """Build `strategy`'s buckets for the same parameters, whose values move in, and pieces without state.

        A bucket of the order before goes as soon as all that was in it is elsewhere.
        """
        plan = self.preview(strategy)
        shards = None if self.shards is None else self.shards.fresh()
        return self._build(strategy, plan, shards), shards

    def install(self, strategy: Strategy, order: list[Bucket], shards: ShardUpdate | None) -> None:
        """Replace buckets, pieces and strategy by what :meth:`draft` gave."""
        self.strategy, self.shards = strategy, shards
        self.order[:] = order

    @property
    def units(self) -> list[tuple[int, ...]]:
        """The parameters in buckets, by slot and layer, in the order of their use. After the first step."""
        assert self._facts is not None, "learning comes first"
        return [unit for unit in self._facts.units if unit]

    @property
    def specs(self) -> list[TensorSpec]:
        """What planning knows of each parameter, by slot."""
        return self._specs()[0]

    @property
    def unguarded(self) -> list[Bucket]:
        """The buckets with parameters that no gate is known to hand out."""
        outside = {self.slots[index].bucket for index in self._unguarded}
        return [bucket for bucket in self.order if bucket in outside]

    def preview(self, strategy: Strategy) -> Plan:
        """The plan of `strategy` for the parameters that are in buckets; nothing is built."""
        facts = self._facts
        assert facts is not None, "learning comes first"
        self._find_owners(facts.arrivals)
        specs, shardable = self._specs()
        if not facts.arrivals:  # features have claimed all of them
            return ()
        if not self._groups:
            return strategy.plan(facts, specs, shardable, self._sharers.size)
        members = members_of(self._groups, facts)
        rest = _without(facts, {index for group in members for index in group})
        plan: Plan = ()
        if rest.arrivals:
            plan = strategy.plan(rest, specs, shardable, self._sharers.size)
        return plan_groups(members, plan, facts, specs, shardable, self._sharers.size, strategy.residency)

    @property
    def reread(self) -> list[Slot]:
        """The parameters that backward may read after their gradients: seen to be so, or not seen by any gate."""
        assert self._facts is not None, "learning comes first"
        return [self.slots[index] for index in sorted(self._unguarded | self._facts.reread)]

    def _find_owners(self, indices: Iterable[int]) -> None:
        """Parameters that come into buckets get owners, if the strategy cuts none. They keep them, whatever the plan."""
        homeless = (index for index in sorted(indices) if index not in self._owners)
        new = [index for index in homeless if self._can_shard(self.slots[index])]
        loads = [0] * self._sharers.size
        for index, owner in self._owners.items():
            loads[owner] += self.slots[index].param.numel()
        owners = self.strategy.owners([self.slots[index].param.numel() for index in new], loads)
        if owners is not None:
            self._owners.update(zip(new, owners, strict=True))

    def _can_shard(self, slot: Slot) -> bool:
        return self.shards is not None and is_dense(slot.param.data)

    def _specs(self) -> tuple[list[TensorSpec], list[bool]]:
        specs, shardable = [], []
        for slot in self.slots:
            param = slot.param
            can_shard = self._can_shard(slot)
            shardable.append(can_shard)
            kind = (str(param.dtype), str(param.device), can_shard)
            owner = self._owners.get(slot.index) if can_shard else None
            wire = self._exchange.wire_itemsize(param.dtype)
            specs.append(TensorSpec(param.numel(), param.element_size(), kind, owner, wire))
        return specs, shardable

    def _build(
        self, strategy: Strategy, plan: Plan, shards: ShardUpdate | None, *, first: int = 0, fill: bool = False
    ) -> list[Bucket]:
        """The buckets of `strategy`'s `plan`. With `fill`, each takes its gradients before the next is made, so that the
        memory in which backward left them is free for that: a step needs it once, the first step as well. Free is not
        enough where buckets are larger than the holes: see `overlap.core.buckets.heap`.
        """
        order = []
        left = Counter(slot.bucket for slot in self.slots)
        with Freed() as freed:
            for number, planned in enumerate(plan, first):
                slots = [self.slots[index] for index in planned.spec.tensors]
                before = Counter(slot.bucket for slot in slots)
                if planned.sharded:
                    there = [slot for slot in slots if slot.bucket is None and slot.filling is None]
                    self._outlived += [slot for slot in there if shared(slot.param)]
                bucket = self._bucket(strategy, number, planned, slots)
                order.append(bucket)
                if planned.sharded:
                    assert shards is not None, "a strategy shards only what is shardable"
                    shards.add(bucket, self._sharers.rank)
                    self._states.placed(shards, bucket)
                else:
                    _take_out(bucket, before)
                left.subtract(before)
                for old in before:
                    if old is not None and not left[old]:
                        if self.shards is not None:
                            self.shards.release(old)
                        freed.more(old.nbytes if old.gradients.whole.device.type == "cpu" else 0)
                        memory = None if old.gathering is None else old.gathering.watch
                        old.release()
                        if memory is not None and old.master is None and outlives(memory):
                            self._outlived.append(old.slots[0])
                if fill:
                    for slot in bucket.slots:
                        slot.fill()
                    if bucket.gradients.whole.device.type == "cpu":
                        freed.more(bucket.nbytes)
        self._tell_of_outlived()
        return order

    def _tell_of_outlived(self) -> None:
        """Warn, once and on rank 0, where somebody has tensors over memory in which parameters were before."""
        if self._outlived and not self._told and self._comm.rank == 0:
            log.warning(
                "a tensor over the memory of parameter %r, or of one that travelled with it, was kept (w = "
                "layer.weight.data, a state_dict() or a graph) while its bucket was made, and shows old values from now "
                "on: buckets are made in the first step, and again where the plan changes. Read parameters through their "
                "module (this is said once)",
                self._outlived[0].name,
            )
        self._told = self._told or bool(self._outlived)
        self._outlived.clear()

    def _bucket(self, strategy: Strategy, number: int, plan: BucketPlan, slots: list[Slot]) -> Bucket:
        on_cpu = slots[0].param.is_cpu  # where a buffer that is not used takes no memory
        make: Callable[..., Bucket] = FreedBucket if plan.freed else Bucket
        if plan.on_host:
            assert self._host is not None, "whose plan has parameters on hosts is given their memory"
            make = partial(HostBucket, host=self._host)
        return make(
            number,
            plan,
            slots,
            rank=self._sharers.rank,
            world_size=self._sharers.size,
            collectives=strategy.collectives or (HOST_COLLECTIVES if plan.on_host else COLLECTIVES),
            op=self._exchange.op,
            make_master=self._make_master,
            carried=strategy.carries and self._comm.rounds,
            lone=on_cpu and self._comm.size == 1 and self._exchange.plain and strategy.updates is Updates.WHOLE,
            lane=lane_of(plan.spec.shares(self._sharers.size), self._lanes),
            offload=self._comm.streams if strategy.offload else None,
        )


def _take_out(bucket: Bucket, before: Iterable[Bucket | None]) -> None:
    """Parameters of a bucket that does not hold any, and came from some that did, get memory of their own."""
    if any(old is not None and old.sharded for old in before):
        for slot in bucket.slots:
            slot.param.data = slot.param.detach().clone()


def _without(facts: Facts, frozen: set[int]) -> Facts:
    """Facts about what can have gradients; frozen parameters get buckets when they are unfrozen."""
    return replace(
        facts,
        units=tuple(unit for unit in (tuple(i for i in u if i not in frozen) for u in facts.units) if unit),
        arrivals=tuple(index for index in facts.arrivals if index not in frozen),
        unseen=facts.unseen - frozen,
        idle=facts.idle - frozen,
    )


def _with_late(facts: Facts, late: tuple[int, ...], num_slots: int) -> Facts:
    """Facts that know parameters which came later; a new plan keeps them apart, like those that were idle at first."""
    return replace(
        facts,
        units=(*facts.units, late),
        arrivals=(*facts.arrivals, *late),
        fires=facts.fires + (1,) * (num_slots - len(facts.fires)),
        idle=facts.idle | set(late),
        moments=facts.moments and facts.moments + facts.moments[-1:] * (num_slots - len(facts.moments)),
    )
