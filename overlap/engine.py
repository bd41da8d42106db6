"""The machinery between hooks and collectives: learns the model, builds its buckets, moves them.

first iteration:  observe ─▶ agree on rank 0's facts ─▶ plan ─▶ buckets          (inside the first step)
afterwards:       gradient hooks ─▶ window ─▶ strategy.reduce     gates ─▶ wait for strategy.gather
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from overlap.bucket import Bucket, Slot
from overlap.communicator import Communicator
from overlap.deferred import DeferredUpdates
from overlap.dense import unused_positions
from overlap.eager import EagerUpdates
from overlap.exchange import Exchange
from overlap.gates import Gates
from overlap.grouping import Groups
from overlap.objects import agree, allgather_object
from overlap.observer import Observer
from overlap.owners import holders
from overlap.planner import Planner
from overlap.reshard import move_state
from overlap.shard_update import ShardUpdate
from overlap.sparse import average_sparse
from overlap.strategy import Plan, Strategy
from overlap.transit import Transit
from overlap.window import GradientWindow

__all__ = ["Engine"]


class Engine:
    """Slots, buckets, hooks and gates of one optimizer. It decides nothing that only this rank knows."""

    def __init__(
        self,
        comm: Communicator,
        gathers: Communicator,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module | None,
        slots: list[Slot],
        strategy: Strategy,
        exchange: Exchange,
        *,
        groups: Groups,
        sparse_as_dense: bool,
        passes: int,
        sharding: bool,
        deferring: bool,
        poison: bool,
    ) -> None:
        self.comm, self.slots = comm, slots
        self._exchange, self._sparse_as_dense = exchange, sparse_as_dense
        self.suspended = False  # inside no_sync()
        self.changing: Callable[[], AbstractContextManager[None]] = (
            nullcontext  # around changes of who holds which state
        )
        self._planner = Planner(comm, optimizer, slots, strategy, groups, ShardUpdate(optimizer) if sharding else None)
        self.order = self._planner.order  # in order of issue
        self.transit = Transit(gathers, lambda comm, bucket: self.strategy.gather(comm, bucket), poison=poison)
        self._model = model
        self._by_param = {id(slot.param): slot for slot in slots}
        self._observer: Observer | None = Observer(slots)
        self.window = GradientWindow(
            slots,
            self.order,
            passes=passes,
            hold_last=sharding,  # [Note: nobody overtakes a step]
            skippable=not (sharding and strategy.eager),
            ordered=strategy.ordered,
            launch=self._launch,
            settle=self._settle,
        )
        eager = sharding and strategy.eager
        self.eager = EagerUpdates(comm, optimizer, self.window, self.transit) if eager else None
        self.deferred = DeferredUpdates(optimizer, self.transit, self._settle, poison=poison) if deferring else None
        self._hooks: dict[int, RemovableHandle] = {}
        self._gates = Gates(self._touch, self._enter, self._leave)
        self._guard()
        self._hook_gradients()

    @property
    def learning(self) -> bool:
        """Until the first step: nothing is in buckets, nothing is sharded, gradients are the user's own tensors."""
        return self._observer is not None

    @property
    def shards(self) -> ShardUpdate | None:
        """None where every rank updates whole parameters."""
        return self._planner.shards

    @property
    def sharded(self) -> ShardUpdate:
        assert self.shards is not None, "only buckets that hold parameters are updated in shards"
        return self.shards

    @property
    def strategy(self) -> Strategy:
        return self._planner.strategy

    # - Hooks: they only dispatch

    def _is_managed(self, parameter: Any) -> bool:
        return id(parameter) in self._by_param

    def _guard(self) -> None:
        """Set gates on the model's modules, and on others that hold what the model does not."""
        modules = [] if self._model is None else list(self._model.modules())
        theirs = {id(parameter) for module in modules for parameter in dict.values(module._parameters)}
        strangers = [slot.param for slot in self.slots if id(slot.param) not in theirs]
        self._gates.guard([*modules, *(holders(strangers) if strangers else ())], self._is_managed)

    def _hook_gradients(self) -> None:
        """Also called at each step, for parameters that were frozen and are not any more."""
        for slot in self.slots:
            if slot.index not in self._hooks and slot.param.requires_grad:
                self._hooks[slot.index] = slot.param.register_post_accumulate_grad_hook(self._gradient_hook(slot))

    def _gradient_hook(self, slot: Slot) -> Callable[[torch.Tensor], None]:
        """What a parameter holds does not hold us: the garbage collector cannot see through a parameter's hooks.

        We live as long as the optimizer does, or the gates in its modules.
        """
        reference, index = weakref.ref(self), slot.index

        def ready(param: torch.Tensor) -> None:
            engine = reference()
            if engine is not None:
                engine._gradient_ready(engine.slots[index], param)

        return ready

    def _gradient_ready(self, slot: Slot, param: torch.Tensor) -> None:
        if self._sparse_as_dense and param.grad is not None and param.grad.layout is not torch.strided:
            param.grad = param.grad.to_dense()
        if self.suspended:
            return
        if self._observer is not None:
            slot.fires += 1
            slot.note()
            self._observer.gradient(slot)
        elif slot.bucket is not None:
            self._refuse_sparse(slot)
            if self.eager is not None:
                self.eager.poll()  # before what is ready now is issued: it is now that the wire may be idle
            self.window.grad_ready(slot)
        elif slot.sparse:
            slot.fires += 1
            slot.note()

    def _refuse_sparse(self, slot: Slot) -> None:
        if slot.param.grad is not None and slot.param.grad.layout is not torch.strided:
            raise TypeError(
                f"the gradient of {slot.name!r} has layout {slot.param.grad.layout}, and was dense or missing on all ranks "
                "when the buckets were planned; wrap the optimizer with sparse_as_dense=True"
            )

    def _touch(self, parameter: torch.nn.Parameter) -> None:
        if not self.transit and self._observer is None:
            return
        slot = self._by_param.get(id(parameter))
        if slot is None:
            return
        if self._observer is not None:
            self._observer.touch(slot)
        elif slot.bucket is not None:
            if self.eager is not None:
                self.eager.refuse_read(slot)
            self.transit.arrive(slot.bucket)

    def _enter(self, module: torch.nn.Module) -> None:
        if self._observer is not None:
            self._observer.enter(module)
        self.transit.arrive_entry()
        if self.transit or self._observer is not None:
            for parameter in dict.values(module._parameters):
                if parameter is not None:
                    self._touch(parameter)

    def _leave(self, module: torch.nn.Module) -> None:
        if self._observer is not None:
            self._observer.leave(module)

    # - Learning

    def learn(self) -> None:
        """End the first iteration: plan from what rank 0 saw. On every rank, inside the first step."""
        if self._observer is None:
            return
        facts = agree(self.comm, self._observer.finish())
        self._observer = None
        self._find_sparse(self.slots)
        self._planner.begin(facts, self.window.passes)
        self._follow_plan()

    def preview(self, strategy: Strategy) -> Plan:
        """The buckets that :meth:`replan` would make. After the first step; communicates nothing."""
        return self._planner.preview(strategy)

    def _find_sparse(self, slots: Sequence[Slot]) -> None:
        """Which of `slots` any rank has a sparse gradient for. On every rank."""
        mine = {s.index for s in slots if s.param.grad is not None and s.param.grad.layout is torch.sparse_coo}
        modules = () if self._model is None else self._model.modules()
        declared = {id(m.weight) for m in modules if getattr(m, "sparse", False) and hasattr(m, "weight")}
        if not self._sparse_as_dense:
            mine |= {slot.index for slot in slots if id(slot.param) in declared}
        for index in set().union(*allgather_object(self.comm, mine)):
            self.slots[index].sparse = True

    def replan(self, strategy: Strategy) -> None:
        """Go on with `strategy`'s buckets; parameters and the optimizer's state move over, bit for bit.

        On every rank, between ``step()`` and the next backward. Raises ``RuntimeError`` when gradients are there, and
        ``ValueError`` for a strategy that shards updates where this one does not, or the reverse.
        """
        if strategy.sharding is not self.strategy.sharding:
            raise ValueError(
                f"strategy {strategy.name!r} has sharding={strategy.sharding} and {self.strategy.name!r}, which it would "
                f"replace, has sharding={self.strategy.sharding}"
            )
        if strategy.eager is not self.strategy.eager:
            raise ValueError(f"eager cannot change from {self.strategy.eager} to {strategy.eager} in a replan")
        if strategy.gather_dtype is not self.strategy.gather_dtype:
            raise ValueError(
                f"gather_dtype cannot change from {self.strategy.gather_dtype} to {strategy.gather_dtype} in a replan"
            )
        if self.window.touched:
            raise RuntimeError("gradients arrived since the last step(); replan after step() or zero_grad()")
        if self.learning:
            self._planner.strategy = strategy
            return
        self.transit.arrive_all()
        order, shards = self._planner.draft(strategy)
        if self.shards is not None and shards is not None:
            move_state(self.comm, self.order, self.shards, shards)
        with self.changing():  # until now questions were answered from the old pieces
            self._planner.install(strategy, order, shards)
        self._follow_plan()

    def _follow_plan(self) -> None:
        self.transit.entry = self._planner.unguarded
        if self.eager is not None:
            self.eager.follow(self.order, self.shards, self._planner.reread)

    def add_slots(self, slots: Sequence[Slot]) -> None:
        """Take on new parameters; they get buckets in the next step."""
        self.slots += slots
        self._by_param.update({id(slot.param): slot for slot in slots})
        self._gates.remove()
        self._guard()
        self._hook_gradients()

    # - Moving buckets

    def prepare(self) -> None:
        """All gradients of this step reduced or on their way. On every rank, before anything uses them."""
        self.learn()
        self._hook_gradients()
        if self._planner.late:
            self._find_sparse(self._planner.late)
            self._planner.extend()
            self._follow_plan()
        if self.deferred is not None:
            self.transit.arrive_all()  # nobody used these since the last step; their buffers are free then
        window = self.window
        window.verify(sharded_only=window.reduced)
        window.flush()
        average_sparse(self.comm, self.slots, self._exchange)

    def _launch(self, bucket: Bucket) -> None:
        self.transit.arrive(bucket)  # nobody used these parameters since the last step
        self._exchange.load(bucket)
        self.strategy.reduce(self.comm, bucket)

    def _settle(self, bucket: Bucket) -> None:
        if bucket.work is not None:
            bucket.work.wait()
            bucket.work = None
        self._exchange.unload(bucket)
        if bucket.holds_parameters:
            self.sharded.take(bucket)
        else:
            self.find_unused(bucket)
        self._exchange.rescale(bucket, self.shards)

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
