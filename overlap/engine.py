"""The machinery between hooks and collectives: learns the model, builds its buckets, moves them.

first iteration:  observe ─▶ agree on rank 0's facts ─▶ plan ─▶ buckets          (inside the first step)
afterwards:       gradient hooks ─▶ window ─▶ strategy.reduce     gates ─▶ wait for strategy.gather
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from overlap.attendance import Attendance
from overlap.bucket import Bucket, Slot
from overlap.conversion import Conversion, changes
from overlap.deferred import DeferredUpdates
from overlap.eager import EagerUpdates
from overlap.exchange import Exchange
from overlap.gates import Gates
from overlap.grouping import Groups
from overlap.hooks import GradientHooks
from overlap.lanes import Lanes
from overlap.master import check_gather_dtype
from overlap.objects import allgather_object
from overlap.observer import Observer
from overlap.owners import holders
from overlap.planner import Planner
from overlap.reshard import move_state
from overlap.roll import CannotJoin
from overlap.shard_update import ShardUpdate
from overlap.skips import Skips
from overlap.sparse import average_sparse, find_sparse, refuse_sparse
from overlap.startup import SignatureMismatch, compare, line
from overlap.strategy import Plan, Strategy
from overlap.transit import Transit
from overlap.updates import Updates
from overlap.window import GradientWindow
from overlap.work import arrive

__all__ = ["Engine"]


class Engine:
    """Slots, buckets, hooks and gates of one optimizer. It decides nothing that only this rank knows."""

    def __init__(
        self,
        reductions: Lanes,
        gathers: Lanes,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module | None,
        slots: list[Slot],
        strategy: Strategy,
        exchange: Exchange,
        attendance: Attendance,
        *,
        groups: Groups,
        sparse_as_dense: bool,
        passes: int,
        updates: Updates,
        poison: bool,
    ) -> None:
        self.comm = comm = reductions.first
        self._reductions, self.slots = reductions, slots
        self._exchange, self._sparse_as_dense, self.attendance = exchange, sparse_as_dense, attendance
        attendance.trainable = lambda: [slot.index for slot in slots if slot.param.requires_grad]
        attendance.shared_order = not strategy.ordered
        self.suspended = False  # inside no_sync()
        self.accumulating = False  # since the last step, gradients arrived that no reduction has seen
        self._converted = False  # parameters are not of their buckets' type any more: gradients wait for new ones
        self.ended = ""  # why this optimizer cannot step any more
        self.conversion: Conversion  # set by whoever gives this optimizer a name between ranks
        self.skips: Skips  # as well
        self.changing: Callable[[], AbstractContextManager[None]] = nullcontext  # around changes of who holds what
        shards = ShardUpdate(optimizer, whole=updates is Updates.OWNED) if updates.in_shards else None
        self._planner = Planner(comm, optimizer, slots, strategy, groups, shards)
        self.order = self._planner.order  # in order of issue
        self.transit = Transit(gathers, lambda comm, bucket: self.strategy.gather(comm, bucket), poison=poison)
        self._model, self._optimizer = model, optimizer
        self._by_param = {id(slot.param): slot for slot in slots}
        self._observer: Observer | None = Observer(slots)
        self.window = GradientWindow(
            slots,
            self.order,
            attendance,
            passes=passes,
            hold_last=updates.in_shards,  # [Note: nobody overtakes a step]
            skippable=updates is not Updates.EAGER,
            ordered=strategy.ordered,
            launch=self._launch,
            settle=self._settle,
            arrive=self._arrive_left,
        )
        self.eager = self.deferred = None
        if updates is Updates.EAGER:
            self.eager = EagerUpdates(comm, optimizer, self.window, self.transit)
        if updates is Updates.DEFERRED:
            self.deferred = DeferredUpdates(optimizer, self.transit, self._settle, poison=poison)
        self._hooks = GradientHooks(self._gradient_ready)
        self._gates = Gates(self._touch, self._enter, self._leave)
        self._guard()
        self._hooks.attach(slots)

    @property
    def learning(self) -> bool:
        """Until the first step: nothing is in buckets, nothing is sharded, gradients are the user's own tensors."""
        return self._observer is not None

    @property
    def open_step(self) -> bool:
        """Whether gradients wait for a step that all ranks can still take."""
        return self.window.touched and not self.ended and not changes(self.slots)

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

    def _guard(self) -> None:
        """Set gates on the model's modules, and on others that hold what the model does not."""
        modules = [] if self._model is None else list(self._model.modules())
        theirs = {id(parameter) for module in modules for parameter in dict.values(module._parameters)}
        strangers = [slot.param for slot in self.slots if id(slot.param) not in theirs]
        others = holders(strangers) if strangers else ()
        self._gates.guard([*modules, *others], lambda parameter: id(parameter) in self._by_param)

    def _gradient_ready(self, index: int, param: torch.Tensor) -> None:
        slot = self.slots[index]
        if self._sparse_as_dense and param.grad is not None and param.grad.layout is not torch.strided:
            param.grad = param.grad.to_dense()
        self.accumulating = self.suspended
        if self.suspended:
            return
        if self._observer is not None:
            slot.fires += 1
            slot.note()
            self._observer.gradient(slot)
        elif slot.bucket is not None:
            refuse_sparse(slot)
            if not self.window.begun:
                self.window.begun = True
                self._converted = any(other.converted for other in self.slots)
            if self._converted:
                self.window.await_step(slot)
                return
            if self.eager is not None:
                self.eager.poll(slot.bucket)  # before what is ready now is issued: it is now that the wire may be idle
            self.window.grad_ready(slot)
        elif slot.sparse:
            slot.fires += 1
            slot.note()

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
        self.skips.passed = self.skips.passed or torch.is_grad_enabled()
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
        learned = allgather_object(self.comm, (self._observer.finish(), [line(slot) for slot in self.slots]))
        compare("parameters", [lines for _, lines in learned])  # they may have been converted since the start
        found = [facts for facts, _ in learned]
        facts = next((facts for facts in found if any(facts.fires)), found[0])  # rank 0 may have joined at once
        self._observer = None
        self._mark_sparse(self.slots)
        self._planner.begin(facts, self.window.passes)
        self._follow_plan()

    def preview(self, strategy: Strategy) -> Plan:
        """The buckets that :meth:`replan` would make. After the first step; communicates nothing."""
        return self._planner.preview(strategy)

    def _mark_sparse(self, slots: Sequence[Slot]) -> None:
        """On every rank: note which of `slots` have sparse gradients."""
        for index in find_sparse(self.comm, slots, None if self._sparse_as_dense else self._model):
            self.slots[index].sparse = True

    def replan(self, strategy: Strategy) -> None:
        """Go on with `strategy`'s buckets; parameters and the optimizer's state move over, bit for bit.

        On every rank, between ``step()`` and the next backward. Raises ``RuntimeError`` when gradients are there, and
        ``ValueError`` for a strategy that updates or gathers in another way.
        """
        self.strategy.refuse_successor(strategy)
        if self.window.touched:
            raise RuntimeError("gradients arrived since the last step(); replan after step() or zero_grad()")
        if self.learning:
            self._planner.strategy = strategy
            return
        mine = changes(self.slots)
        if mine:
            raise RuntimeError(
                f"parameter {mine[0].name!r} was converted from {mine[0].before} to {mine[0].now} since the last step(); "
                "replan after the next one"
            )
        self.transit.arrive_all()
        self._rebuild(strategy)

    def _rebuild(self, strategy: Strategy) -> None:
        """Other buckets for the same parameters, whose values and state move over. On every rank."""
        order, shards = self._planner.draft(strategy)
        if self.shards is not None and shards is not None:
            move_state(self.comm, self.order, self.shards, shards)
        with self.changing():  # until now questions were answered from the old pieces
            self._planner.install(strategy, order, shards)
        self._follow_plan()

    def _follow_conversion(self) -> None:
        """New buckets where all ranks have converted parameters since the last step, for gradients that wait for them.

        Raises ``SignatureMismatch`` on every rank where some have not, or to another type: [Note: who has converted by
        when] in `overlap.conversion`.
        """
        mine = changes(self.slots)
        if not mine:
            return
        if any(slot.filled for slot in self.slots):
            raise RuntimeError(
                f"parameter {mine[0].name!r} was converted from {mine[0].before} to {mine[0].now} between backward() and "
                "step(), while gradients were on their way; convert after step() or zero_grad()"
            )
        self.conversion.tell(self.attendance.round, mine)
        self.window.leave_out()  # raises where ranks differ
        self.conversion.settled()
        if any(slot.place is not None and slot.param.device.type != slot.place.device.type for slot in self.slots):
            raise RuntimeError(
                f"parameter {mine[0].name!r} was {mine[0].before} when the optimizer was wrapped and is {mine[0].now} now; "
                "what carries gradients was chosen for that device; move the model before wrapping"
            )
        named = ((slot.name, slot.param) for slot in self.slots)
        check_gather_dtype(self.strategy.gather_dtype, named, self._optimizer, sharding=self.shards is not None)
        for slot in self.slots:
            if slot.converted:
                slot.keep_layout()
        self._rebuild(self.strategy)

    def _follow_plan(self) -> None:
        self.transit.entry = self._planner.unguarded
        if self.eager is not None:
            self.eager.follow(self.order, self.shards, self._planner.reread)

    def detach(self) -> None:
        """Leave the model alone."""
        self._gates.remove()
        self._hooks.remove()

    def add_slots(self, slots: Sequence[Slot]) -> None:
        """Take on new parameters; they get buckets in the next step."""
        self.slots += slots
        self._by_param.update({id(slot.param): slot for slot in slots})
        self._gates.remove()
        self._guard()
        self._hooks.attach(self.slots)

    # - Moving buckets

    def prepare(self) -> None:
        """All gradients of this step reduced or on their way. On every rank, before anything uses them."""
        if self.ended:
            raise RuntimeError(self.ended)
        self._follow_conversion()
        self.attendance.start("prepare")
        self.skips.step()
        self.learn()
        self._hooks.attach(self.slots)  # those that were frozen and are not any more
        self._arrive_left()
        window = self.window
        window.verify(sharded_only=window.reduced)
        window.flush()
        if self._planner.late:  # how many buckets were issued before this differs between ranks
            self._mark_sparse(self._planner.late)
            self._planner.extend()
            self._follow_plan()
            window.flush()
        self.attendance.meet(not (self.order and self.order[-1].meets) and not any(slot.sparse for slot in self.slots))
        average_sparse(self.comm, self.slots, self._exchange, lambda: self._correction(self.attendance.round))

    def _arrive_left(self) -> None:
        if self.deferred is not None:
            self.transit.arrive_all()  # nobody used these since the last step; their buffers are free then

    def _launch(self, bucket: Bucket) -> None:
        self.transit.arrive(bucket)  # nobody used these parameters since the last step
        self._exchange.load(bucket)
        self.attendance.open()
        bucket.round = self.attendance.round
        self.strategy.reduce(self._reductions.of(bucket), bucket)

    def _settle(self, bucket: Bucket) -> None:
        if bucket.work is not None:
            arrive(bucket.work)
            bucket.work = None
        try:
            self.conversion.check(bucket.round)
        except (SignatureMismatch, CannotJoin) as error:
            self.ended = f"this optimizer cannot go on: {error}"
            if bucket.round == self.attendance.round:  # not all is issued where this came in the middle of backward
                self.window.flush()
                self.attendance.meet(not self.order[-1].meets)
            raise
        self._exchange.unload(bucket)
        if bucket.holds_parameters:
            self.sharded.take(bucket)
        else:
            bucket.find_unused()
        self._exchange.rescale(bucket, self.shards, self._correction(bucket.round))

    def _correction(self, number: int) -> float:
        """By what averages of round `number` are multiplied where ranks had joined."""
        factor = self.attendance.factor(number)
        return factor if self._exchange.averages else 1.0
