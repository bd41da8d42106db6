"""The machinery between hooks and collectives: learns the model, builds its buckets, moves them.

first iteration:  observe ─▶ agree on rank 0's facts ─▶ plan ─▶ buckets          (inside the first step)
afterwards:       gradient hooks ─▶ window ─▶ strategy.reduce     gates ─▶ wait for strategy.gather
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from overlap.bucket import Bucket, Phase, Slot
from overlap.communicator import Communicator
from overlap.dense import is_dense, unused_positions
from overlap.gates import Gates
from overlap.objects import agree
from overlap.observer import Facts, Observer
from overlap.partition import TensorSpec
from overlap.shard_update import ShardUpdate
from overlap.strategy import Plan, Strategy
from overlap.window import GradientWindow

__all__ = ["Engine"]


class Engine:
    """Slots, buckets, hooks and gates of one optimizer. It decides nothing that only this rank knows."""

    def __init__(
        self,
        comm: Communicator,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module | None,
        slots: list[Slot],
        strategy: Strategy,
        *,
        passes: int,
        sharding: bool,
        poison: bool,
    ) -> None:
        self.comm, self.strategy, self.slots = comm, strategy, slots
        self.shards = ShardUpdate(optimizer) if sharding else None
        self.suspended = False  # inside no_sync()
        self.order: list[Bucket] = []  # in order of issue
        self._optimizer, self._model, self._poison = optimizer, model, poison
        self._by_param = {id(slot.param): slot for slot in slots}
        self._observer: Observer | None = Observer(slots, find_modules=model is None)
        self.window = GradientWindow(
            slots,
            self.order,
            passes=passes,
            hold_last=sharding,  # [Note: nobody overtakes a step]
            launch=self._launch,
            settle=self._settle,
        )
        self._entry: list[Bucket] = []  # hold parameters no gate hands out: awaited when any forward starts
        self._in_transit: dict[Bucket, None] = {}
        self._hooks: dict[int, RemovableHandle] = {}
        self._gates = Gates(self._touch, self._enter, self._leave)
        if model is not None:
            self._gates.guard(model.modules(), self._is_managed)
        self._hook_gradients()

    @property
    def learning(self) -> bool:
        """Until the first step: nothing is in buckets, nothing is sharded, gradients are the user's own tensors."""
        return self._observer is not None

    @property
    def sharded(self) -> ShardUpdate:
        assert self.shards is not None, "only buckets that hold parameters are updated in shards"
        return self.shards

    # - Hooks: they only dispatch

    def _is_managed(self, parameter: Any) -> bool:
        return id(parameter) in self._by_param

    def _hook_gradients(self) -> None:
        """Also called at each step, for parameters that were frozen and are not any more."""
        for slot in self.slots:
            if slot.index not in self._hooks and slot.param.requires_grad:
                self._hooks[slot.index] = slot.param.register_post_accumulate_grad_hook(self._gradient_hook(slot))

    def _gradient_hook(self, slot: Slot) -> Callable[[torch.Tensor], None]:
        def ready(param: torch.Tensor) -> None:
            if param.grad is not None and param.grad.layout is not torch.strided:
                raise TypeError(
                    f"the gradient of {slot.name!r} has layout {param.grad.layout}; only dense gradients are supported, "
                    "build the layer with sparse=False"
                )
            if self.suspended:
                return
            if self._observer is not None:
                slot.fires += 1
                self._observer.gradient(slot)
            elif slot.bucket is not None:
                self.window.grad_ready(slot)

        return ready

    def _touch(self, parameter: torch.nn.Parameter) -> None:
        if not self._in_transit and self._observer is None:
            return
        slot = self._by_param.get(id(parameter))
        if slot is None:
            return
        if self._observer is not None:
            self._observer.touch(slot)
        elif slot.bucket is not None:
            self.arrive(slot.bucket)

    def _enter(self, module: torch.nn.Module) -> None:
        if self._observer is not None and self._model is not None:
            self._observer.enter(module)
        if self._in_transit:
            for bucket in self._entry:
                self.arrive(bucket)
        if self._in_transit or self._observer is not None:
            for parameter in dict.values(module._parameters):
                if parameter is not None:
                    self._touch(parameter)

    def _leave(self, module: torch.nn.Module) -> None:
        if self._observer is not None and self._model is not None:
            self._observer.leave(module)

    # - Planning

    def learn(self) -> None:
        """End the first iteration: plan from what rank 0 saw. On every rank, inside the first step."""
        if self._observer is None:
            return
        facts = agree(self.comm, self._observer.finish())
        roots, self._observer = list(self._observer.roots), None
        frozen = {slot.index for slot in self.slots if not slot.param.requires_grad and slot.param.grad is None}
        plan = self.strategy.plan(_without(facts, frozen), *self._specs(), self.comm.size)
        self._build(plan)
        for slot in self.slots:
            slot.expected = max(1, round(facts.fires[slot.index] / self.window.passes))
        outside = {self.slots[index].bucket for index in (*facts.unseen, *facts.idle)}
        self._entry += [bucket for bucket in self.order if bucket in outside and bucket.holds_parameters]
        for root in roots:
            self._gates.guard(root.modules(), self._is_managed)

    def extend(self) -> None:
        """Give buckets to parameters that were unfrozen or added since; they are issued last. On every rank."""
        late = [slot for slot in self.slots if slot.bucket is None and slot.param.requires_grad]
        if not late:
            return
        self._hook_gradients()
        indices = tuple(slot.index for slot in late)
        nothing: frozenset[int] = frozenset()
        facts = Facts((indices,), indices, tuple(1 for _ in self.slots), nothing, nothing)
        before = len(self.order)
        self._build(self.strategy.plan(facts, *self._specs(), self.comm.size))
        self._entry += [bucket for bucket in self.order[before:] if bucket.holds_parameters]

    def _specs(self) -> tuple[list[TensorSpec], list[bool]]:
        specs, shardable = [], []
        for slot in self.slots:
            param = slot.param
            can_shard = self.shards is not None and is_dense(param.data)
            shardable.append(can_shard)
            kind = (str(param.dtype), str(param.device), can_shard)
            specs.append(TensorSpec(param.numel(), param.element_size(), kind))
        return specs, shardable

    def _build(self, plan: Plan) -> None:
        rank, size = self.comm.rank, self.comm.size
        for spec, sharded in zip(plan.buckets, plan.sharded, strict=True):
            members = [self.slots[index] for index in spec.tensors]
            number = len(self.order)
            bucket = Bucket(number, spec, members, rank=rank, world_size=size, holds_parameters=sharded)
            self.order.append(bucket)
            if sharded:
                self.sharded.add(bucket, rank)
                self.sharded.shard_state(bucket, self._optimizer.state)

    def add_slots(self, slots: Sequence[Slot]) -> None:
        """Take on new parameters; they get buckets in the next step."""
        self.slots += slots
        self._by_param.update({id(slot.param): slot for slot in slots})
        if self._model is not None:
            self._gates.remove()
            self._gates.guard(self._model.modules(), self._is_managed)
        self._hook_gradients()

    # - Moving buckets

    def prepare(self) -> None:
        """All gradients of this step reduced or on their way. On every rank, before anything uses them."""
        self.learn()
        self.extend()
        self._hook_gradients()
        window = self.window
        window.verify(sharded_only=window.reduced)
        window.flush()

    def _launch(self, bucket: Bucket) -> None:
        self.arrive(bucket)  # nobody used these parameters since the last step
        self.strategy.reduce(self.comm, bucket)

    def _settle(self, bucket: Bucket) -> None:
        if bucket.work is not None:
            bucket.work.wait()
            bucket.work = None
        if bucket.holds_parameters:
            self.sharded.take(bucket)
        else:
            self.find_unused(bucket)

    def find_unused(self, bucket: Bucket) -> None:
        """Read from whole reduced gradients which parameters no rank used."""
        starts, stops = bucket.extents
        for slot, unused in zip(bucket.slots, unused_positions(bucket.gradients, starts, stops), strict=True):
            slot.unused = unused if slot.param.numel() else slot.param.grad is None

    def expose(self, buckets: Iterable[Bucket]) -> None:
        """Make ``.grad`` the averaged gradient, None where no rank used the parameter."""
        for bucket in buckets:
            for slot in bucket.slots:
                slot.param.grad = None if slot.unused else slot.view

    def send_parameters(self, bucket: Bucket) -> None:
        """Issue the all-gather of a bucket whose shard was updated."""
        params = [slot.param for slot in bucket.slots]
        torch.autograd.graph.increment_version(params)  # written behind autograd's back: old graphs must notice
        if self._poison and self.comm.size > 1:
            mine = bucket.parameters[bucket.own].clone()
            bucket.parameters.fill_(float("nan"))
            bucket.parameters[bucket.own] = mine
        self.strategy.gather(self.comm, bucket)
        bucket.advance(Phase.GATHERING)
        self._in_transit[bucket] = None

    def arrive(self, bucket: Bucket) -> None:
        """Wait until the parameters of `bucket` are final."""
        if bucket not in self._in_transit or _in_forked_child:
            return
        if bucket.work is not None:
            bucket.work.wait()
            bucket.work = None
        del self._in_transit[bucket]
        bucket.advance(Phase.FILLING)

    def arrive_all(self) -> None:
        for bucket in list(self._in_transit):
            self.arrive(bucket)


def _without(facts: Facts, frozen: set[int]) -> Facts:
    """Facts about what can have gradients; frozen parameters get buckets when they are unfrozen."""
    return Facts(
        units=tuple(unit for unit in (tuple(i for i in u if i not in frozen) for u in facts.units) if unit),
        arrivals=tuple(index for index in facts.arrivals if index not in frozen),
        fires=facts.fires,
        unseen=facts.unseen - frozen,
        idle=facts.idle - frozen,
        moments=facts.moments,
    )


_in_forked_child = False  # there is no engine thread to wait for in a child, and nobody awaits its values


def _forget_transit() -> None:
    global _in_forked_child
    _in_forked_child = True


os.register_at_fork(after_in_child=_forget_transit)
