"""The machinery between hooks and collectives: tells who needs to know, and moves buckets.

first iteration:  observe ─▶ agree on rank 0's facts ─▶ plan ─▶ buckets          (`overlap.core.arrangement`)
afterwards:       gradient hooks ─▶ window ─▶ strategy.reduce     gates ─▶ wait for strategy.gather
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Sequence

import torch

from overlap.core.arrangement import Arrangement
from overlap.core.attendance import Attendance
from overlap.core.bucket import Bucket, Slot
from overlap.core.closing import Closing, zeroing
from overlap.core.conversion import changes
from overlap.core.gates import Gates
from overlap.core.gathering import Transit
from overlap.core.hooks import GradientHooks
from overlap.core.owners import hands_out, holders
from overlap.core.planner import Planner
from overlap.core.shards import ShardUpdate, StatePlacement
from overlap.core.strategy import Strategy
from overlap.core.window import GradientWindow
from overlap.core.wire import Exchange
from overlap.features.deferred import DeferredUpdates
from overlap.features.early import EagerUpdates
from overlap.features.sparse import average_sparse, refuse_sparse
from overlap.optimizer.param_groups import Wrapped
from overlap.plan.groups import Groups
from overlap.plan.plan import Updates
from overlap.transport.communicator import Communicator
from overlap.transport.work import arrive

__all__ = ["Engine"]


class Engine:
    """Slots, buckets, hooks and gates of one optimizer. It decides nothing that only this rank knows."""

    def __init__(
        self,
        reductions: Sequence[Communicator],
        gathers: Sequence[Communicator],
        calls: Communicator,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module | None,
        slots: list[Slot],
        strategy: Strategy,
        exchange: Exchange,
        attendance: Attendance,
        states: StatePlacement,
        *,
        groups: Groups,
        sparse_as_dense: bool,
        passes: int,
        updates: Updates,
        poison: bool,
    ) -> None:
        self.comm = comm = reductions[0]
        self._reductions, self.slots = tuple(reductions), slots
        self._exchange, self._sparse_as_dense, self.attendance = exchange, sparse_as_dense, attendance
        attendance.trainable = lambda: [slot.index for slot in slots if slot.param.requires_grad]
        attendance.shared_order = not strategy.ordered
        self.suspended = False  # inside no_sync()
        self._factor = -1, 1.0  # of a round, what its averages are multiplied by
        self.accumulating = False  # since the last step, gradients arrived that no reduction has seen
        shards = ShardUpdate(optimizer, whole=updates is Updates.OWNED) if updates.in_shards else None
        self._planner = Planner(
            comm, optimizer, slots, strategy, groups, shards, states, exchange.wire_itemsize, lanes=len(reductions)
        )
        self.order = self._planner.order  # in order of issue
        self.transit = Transit(gathers, self._planner, poison=poison)
        self._model = model
        self._by_param = {id(slot.param): slot for slot in slots}
        self.window = GradientWindow(
            slots,
            self.order,
            passes=passes,
            hold_last=updates.in_shards,  # [Note: nobody overtakes a step]
            skippable=updates is not Updates.EAGER,
            ordered=strategy.ordered,
            launch=self._launch,
            settle=self._settle,
            arrive=self._arrive_left,
        )
        self.arrangement = Arrangement(
            comm,
            optimizer,
            slots,
            self._planner,
            self.window,
            self.transit,
            states,
            sparse_in=None if sparse_as_dense else model,
        )
        self.eager = self.deferred = None
        if updates is Updates.EAGER:
            self.eager = EagerUpdates(comm, optimizer, self.window, self.transit)
            self.arrangement.follow = self.eager.follow
        if updates is Updates.DEFERRED:
            self.deferred = DeferredUpdates(optimizer, self.transit, self._settle, poison=poison)
        myself, awaited = weakref.ref(self), None if updates is Updates.WHOLE else self.transit
        self.wrapped = Wrapped(optimizer, slots, awaited, lambda: (me := myself()) is not None and me.local)
        self.closing = Closing(calls, slots, self.window, self.arrangement, attendance, self._average_sparse)
        self.window.hold = self.closing.hold
        self.window.drop_unseen = self._drop_unseen
        self._hooks = GradientHooks(self, Engine._gradient_ready)
        self._gates = Gates(self._touch, self._enter, self._leave)
        self._guard()
        self._hooks.attach(slots)

    @property
    def learning(self) -> bool:
        """Until the first step; see :attr:`overlap.core.arrangement.Arrangement.learning`."""
        return self.arrangement.learning

    @property
    def holds_gradients(self) -> bool:
        """Whether gradients arrived since the last step, also those of ``no_sync()``, or that no hook saw."""
        return self.window.touched or self.accumulating or any(slot.given_by_hand for slot in self.slots)

    @property
    def local(self) -> bool:
        """Whether gradients arrived since the last step that ``synchronize()`` has not averaged."""
        return self.holds_gradients and not self.window.synchronized

    @property
    def open_step(self) -> bool:
        """Whether gradients wait for a step that all ranks can still take."""
        return self.window.touched and not self.closing.ended and not changes(self.slots)

    def travels_on(self, names: Collection[str]) -> bool:
        """Whether a communicator of the reductions has one of `names`."""
        return any(comm.name in names for comm in self._reductions)

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
        modules = [] if self._model is None else [module for module in self._model.modules() if hands_out(module)]
        theirs = {id(parameter) for module in modules for parameter in dict.values(module._parameters)}
        strangers = [slot.param for slot in self.slots if id(slot.param) not in theirs]
        others = holders(strangers) if strangers else ()
        self._gates.guard([*modules, *others], lambda parameter: id(parameter) in self._by_param)

    def _gradient_ready(self, index: int, param: torch.Tensor) -> None:
        slot = self.slots[index]
        gradient = param.grad
        if self._sparse_as_dense and gradient is not None and gradient.layout is not torch.strided:
            param.grad = gradient = gradient.to_dense()
        self.accumulating = self.suspended
        if self.suspended:
            self.window.accumulate(slot)
            return
        observer = self.arrangement.observer
        if observer is not None:
            self.window.note(slot)
            observer.gradient(slot)
        elif slot.bucket is not None:
            if gradient is not None and gradient.layout is not torch.strided:
                refuse_sparse(slot)
            if self.eager is not None and not self.window.held:
                self.eager.poll(slot.bucket)  # before what is ready now is issued: it is now that the wire may be idle
            self.window.grad_ready(slot)
        else:  # sparse, or not in a bucket yet
            self.window.note(slot)

    def _touch(self, parameter: torch.nn.Parameter) -> None:
        slot = self._by_param.get(id(parameter))
        if slot is None:
            return
        if self.window.begun:
            self._see_zero_grad()
        observer = self.arrangement.observer
        if observer is not None:
            observer.touch(slot)
        elif slot.bucket is not None:
            if self.eager is not None:
                self.eager.refuse_read(slot)
            if slot.bucket in self.transit.pending:
                self.transit.arrive(slot.bucket)

    def _enter(self, module: torch.nn.Module, *_inputs: object) -> None:
        observer, transit = self.arrangement.observer, self.transit
        if observer is not None:
            observer.enter(module)
        if self.window.unscaled and torch.is_grad_enabled():
            self.window.scale_kept()
        if transit.busy or observer is not None:
            transit.arrive_entry()
            for parameter in dict.values(module._parameters):
                if parameter is not None:
                    self._touch(parameter)

    def _leave(self, module: torch.nn.Module, *_inputs_and_output: object) -> None:
        observer = self.arrangement.observer
        if observer is not None:
            observer.leave(module)

    # - Following the model

    def detach(self) -> None:
        """Leave the model and the optimizer alone."""
        self._gates.remove()
        self.wrapped.remove()
        self._hooks.remove()

    def add_slots(self, slots: Sequence[Slot]) -> None:
        """Take on new parameters; they get buckets in the next step."""
        self.slots += slots
        self._by_param.update({id(slot.param): slot for slot in slots})
        self._gates.remove()
        self._guard()
        self.wrapped.guard()
        self._hooks.attach(self.slots)

    # - Moving buckets

    def close(self, call: str, check: Callable[[], None] | None = None, *, again: bool = False) -> bool:
        """See :meth:`.Closing.close`; hooks those parameters that were frozen and are not any more."""
        if not self.closing.ended:
            self._hooks.attach(self.slots)
        return self.closing.close(call, check, again=again)

    def zero_grad(self, *, zeros: bool) -> None:
        """The script drops the gradients it has, if it has any."""
        self.closing.count()
        self._drop(zeros=zeros)

    def _drop(self, *, zeros: bool) -> None:
        if self.window.touched or self.accumulating or self.closing.closed:
            self._arrive_left()  # the buffers of what was not used since are free then
            self.closing.drop(zeros=zeros)
        self.accumulating = False

    def _drop_unseen(self) -> None:
        """``p.grad = None`` by hand, which backward finds."""
        self.closing.count(unseen=True)
        self.closing.drop()

    def _see_zero_grad(self) -> None:
        """``model.zero_grad()`` reads the parameters, and is about to drop all gradients there are."""
        call = zeroing(sys._getframe(2))
        if call is None:
            return
        modules = call.f_locals["self"].modules()
        members = {id(parameter) for module in modules for parameter in dict.values(module._parameters)}
        if all(id(slot.param) in members for slot in self.slots if slot.fires or slot.filled):
            self.closing.count(unseen=True)
            self._drop(zeros=not call.f_locals["set_to_none"])

    def _average_sparse(self) -> None:
        average_sparse(self.comm, self.slots, self._exchange, lambda: self._correction(self.attendance.round))

    def _arrive_left(self) -> None:
        if self.deferred is not None:
            self.transit.arrive_all()  # nobody used these since the last step; their buffers are free then

    def _launch(self, bucket: Bucket) -> None:
        if bucket in self.transit.pending:
            self.transit.arrive(bucket)  # nobody used these parameters since the last step
        self._exchange.load(bucket)
        attendance = self.attendance
        if not attendance.opened:
            attendance.open()
        bucket.round = attendance.round
        self._planner.strategy.reduce(self._reductions[bucket.lane], bucket)

    def _settle(self, bucket: Bucket) -> None:
        if bucket.work is not None:
            arrive(bucket.work)
            bucket.work = None
        self._exchange.unload(bucket)
        shards = self._planner.shards
        if bucket.holds_parameters:
            assert shards is not None, "only buckets that hold parameters are updated in shards"
            shards.take(bucket)
        else:
            bucket.find_unused()
        self._exchange.rescale(bucket, shards, self._correction(bucket.round))

    def _correction(self, number: int) -> float:
        """By what averages of round `number` are multiplied where ranks had joined."""
        if self._factor[0] != number:  # it is certain once any reduction of the round is done
            factor = self.attendance.factor(number)
            self._factor = number, factor if self._exchange.averages else 1.0
        return self._factor[1]
