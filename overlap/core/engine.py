"""The hooks on gradients and the gates before parameters, which tell the other parts of an optimizer.

first iteration:  observe ─▶ agree on rank 0's facts ─▶ plan ─▶ buckets          (`overlap.core.buckets`)
afterwards:       gradient hooks ─▶ round ─▶ a bucket's reduction        gates ─▶ wait for its gathering
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import torch
from torch.utils.hooks import RemovableHandle

from comm_core import Unsupported
from overlap.core.alike import Clipped
from overlap.core.bucket import Slot, too_many
from overlap.core.buckets.arrangement import Arrangement
from overlap.core.buckets.conversion import changes
from overlap.core.buckets.planner import Planner
from overlap.core.clock import StepClock
from overlap.core.closing import BACKWARD, Closing, zeroing
from overlap.core.cuda_graphs import refuse_capture_of_gate
from overlap.core.feature import Feature, Policy, listeners
from overlap.core.gates.compiled_calls import CompiledCalls
from overlap.core.gates.gates import Gates
from overlap.core.gates.holders import hands_out, holders
from overlap.core.gathering import Transit
from overlap.core.participants import Participants
from overlap.core.round import Round
from overlap.core.shards import ShardUpdate
from overlap.core.unsharding import Unsharder
from overlap.job.session import current
from overlap.plan.strategy import Strategy

__all__ = ["Engine", "Watcher"]


class Watcher(Protocol):
    """An object that is told when modules' forward passes begin, when their parameters are final, and when they end."""

    def entered(self) -> None: ...
    def left(self) -> None: ...


class Engine:
    """The slots of one optimizer, with hooks on them and gates before them. Decides nothing that only this rank knows.

    Its parts have other parts by reference; this one has all.
    """

    def __init__(
        self,
        model: torch.nn.Module | None,
        planner: Planner,
        transit: Transit,
        unsharder: Unsharder,
        round: Round,
        arrangement: Arrangement,
        closing: Closing,
        participants: Participants,
        policy: Policy,
        features: Sequence[Feature],
        *,
        gated: bool,
    ) -> None:
        self._model, self.planner, self.transit, self.unsharder, self.round = model, planner, transit, unsharder, round
        self.arrangement, self.closing, self.participants, self.policy = arrangement, closing, participants, policy
        self.features = tuple(features)
        self.slots, self.order = planner.slots, planner.order  # the latter in order of issue
        self.on_host = planner.strategy.on_host  # whole parameters are; whatever the plan
        self.suspended = False  # inside no_sync()
        self.accumulating = False  # since the last step, gradients arrived that no reduction has seen
        self._clock: StepClock | None = None
        self._capturing = round.comm.streams.capturing if gated and round.comm.streams is not None else None
        self.watcher: Watcher | None = None  # wants to know of forward passes, in some rounds
        self._on_gradient, self._on_ending = listeners(features, "gradient"), listeners(features, "ending")
        self._early = policy if policy.early else None
        self._by_param = {id(slot.param): slot for slot in self.slots}
        self._hooks: dict[int, tuple[RemovableHandle, ...]] = {}  # by slot
        self._gates = Gates(self._touch, self.enter, self.leave, self._refuse_copies)
        self._compiled: CompiledCalls | None = None  # where parameters are freed
        self._guard()
        self._hook_slots()
        unsharder.tell(participants, weakref.WeakMethod(self._backward_begins))

    @property
    def learning(self) -> bool:
        """Whether there was no step yet; see :attr:`overlap.core.buckets.arrangement.Arrangement.learning`."""
        return self.arrangement.learning

    @property
    def holds_gradients(self) -> bool:
        """Whether gradients arrived since the last step, also those of ``no_sync()``, or those that no hook saw."""
        return self.round.touched or self.accumulating or any(slot.given_by_hand for slot in self.slots)

    @property
    def open_step(self) -> bool:
        """Whether gradients wait for a step that all ranks can still take."""
        return self.round.touched and not self.closing.ended and not changes(self.slots)

    @property
    def shards(self) -> ShardUpdate | None:
        """The updates in shards; None where every rank updates whole parameters."""
        return self.planner.shards

    @property
    def sharded(self) -> ShardUpdate:
        assert self.shards is not None, "only buckets that hold parameters are updated in shards"
        return self.shards

    @property
    def strategy(self) -> Strategy:
        return self.planner.strategy

    def measure(self, clock: StepClock | None) -> None:
        """Report to `clock` where the time of steps goes, from now on; None: to nobody. On this rank."""
        if self._clock is not None:
            self._clock.unwatch()
        self._clock = self.transit.clock = clock
        if clock is not None:
            clock.watch(self.order)

    # - Hooks: they only dispatch

    def _hook_slots(self) -> None:
        """Hook those slots that have no hook yet and can have gradients."""
        for slot in self.slots:
            if slot.index not in self._hooks and slot.param.requires_grad:
                handle = slot.param.register_post_accumulate_grad_hook(_hook(weakref.ref(self), slot))
                self._hooks[slot.index] = (handle,)
                if self.on_host:  # which has no unsharder that does this for all of a module
                    before = slot.param.register_hook(_aside(weakref.ref(self), slot))
                    self._hooks[slot.index] = (handle, before)

    def _gradient_ready(self, slot: Slot) -> None:
        for told in self._on_gradient:
            told(slot)
        round = self.round
        self.accumulating = self.suspended
        if self.suspended:
            round.accumulate(slot)
            if self.unsharder.active and slot.freed is not None:
                self.unsharder.came(slot)
            return
        if not round.begun:
            round.begin(held=self.closing.hold())
        if slot.bucket is None:  # no buckets yet, or claimed by a feature, or it came late
            round.note(slot)
            if self.arrangement.observer is not None:
                self.arrangement.observer.gradient(slot)
            return
        if self._early is not None and not round.held:
            self._early.gradient(slot.bucket)  # before what is ready now is issued: now the wire may be idle
        if slot.filled:
            kept = round.restarted(slot)
            self.closing.count(unseen=True)  # ``p.grad = None`` by hand, which backward finds
            self.closing.drop()
            round.restart(kept)
        round.grad_ready(slot)
        if self.unsharder.active and slot.freed is not None:
            self.unsharder.came(slot)

    def _backward_begins(self) -> bool:
        """Backward comes to modules of freed buckets. If the last one was to be reduced, it is, and added to in shards.

        It may have been one for other optimizers of the model: where these have come, too, ranks tell each other.

        Returns whether this one is to be reduced.
        """
        adds = self.round.backwards >= self.round.passes and self.round.may_fold
        if adds and (not self.unsharder.shared or self.closing.ask(self.round.touched, BACKWARD)):
            self.close(BACKWARD)
            self.fold()
        self.round.backwards += not self.suspended
        return not self.suspended

    def fold(self) -> None:
        """Keep the averages of a round, which is closed, for the next one. On every rank, before a backward pass."""
        self.round.settle()
        self.participants.announce("fold")
        self.round.fold()
        self.closing.end_step()
        self.round.folded = True

    def _touch(self, parameter: torch.nn.Parameter) -> None:
        slot = self._by_param.get(id(parameter))
        if slot is None:
            return
        since = None if self._clock is None else self._clock.now()
        if self.round.begun or self.round.backwards:
            self._see_zero_grad()
        observer = self.arrangement.observer
        if observer is not None:
            observer.touch(slot)
        elif slot.bucket is not None:
            if self._clock is not None:
                self._clock.used(slot.index)
            if self._early is not None:
                self._early.read(slot)
            if self.unsharder.active and slot.freed is not None:
                self.unsharder.touch(slot.bucket)
            awaited = slot.bucket in self.transit.pending or slot.bucket in self.transit.landing
            if awaited and not self._reader_drops_gradients():
                self.transit.arrive(slot.bucket)
            if self._clock is not None:
                self._clock.passed(since)

    def _refuse_copies(self, parameter: torch.nn.Parameter) -> None:
        slot = self._by_param.get(id(parameter))
        if slot is not None and slot.freed is not None and self.unsharder.active and not self.unsharder.whole_now:
            raise RuntimeError(
                f"parameter {slot.name!r} is copied or pickled while each rank has a share of it: do that inside `with "
                "dear.whole(model):`, on every rank; model.state_dict() has whole values, too"
            )

    def enter(self, module: torch.nn.Module, *inputs: object) -> None:
        observer, transit = self.arrangement.observer, self.transit
        since = None if self._clock is None else self._clock.now()
        if self._capturing is not None and self._capturing():
            raise Unsupported(refuse_capture_of_gate(self.strategy.name))
        if self.round.unscaled and torch.is_grad_enabled():
            self.round.scale_kept()
        if observer is not None:
            observer.enter(module)
            for parameter in dict.values(module._parameters):
                if parameter is not None:
                    self._touch(parameter)
        if self._clock is not None:
            self._clock.entered(module)
        if transit.busy:
            if transit.entry or not transit.pending:
                transit.arrive_entry()
            for parameter in dict.values(module._parameters):
                slot = self._by_param.get(id(parameter))
                bucket = None if slot is None else slot.bucket
                if slot is not None and bucket is not None and (bucket in transit.pending or bucket in transit.landing):
                    if self._early is not None:
                        self._early.read(slot)
                    transit.arrive(bucket)
        if self.unsharder.active:
            if inputs:
                self.unsharder.enter(module)
            else:  # no hook has called this, but a guard of compiled code
                self.unsharder.read(module)
        if self.watcher is not None:
            self.watcher.entered()
        if self._clock is not None:
            self._clock.passed(since)

    def leave(self, module: torch.nn.Module, *inputs_and_output: object) -> None:
        observer, clock = self.arrangement.observer, self._clock
        if self.unsharder.active and inputs_and_output:
            self.unsharder.leave(inputs_and_output[-1])
        if self.watcher is not None:
            self.watcher.left()
        if observer is not None:
            observer.leave(module)
        if clock is not None:
            since = clock.now()
            clock.left()
            clock.passed(since)

    def _enter_compiled(self, module: torch.nn.Module, _inputs: object) -> None:
        if self.unsharder.active:
            self.unsharder.enter(module, compiled=True)

    def _leave_compiled(self, _module: torch.nn.Module, _inputs: object, output: object) -> None:
        if self.unsharder.active:
            self.unsharder.leave(output)

    # - Following the model

    def _guard(self) -> None:
        """Set gates on the model's modules, and on others that hold what the model does not."""
        modules = [] if self._model is None else [module for module in self._model.modules() if hands_out(module)]
        theirs = {id(parameter) for module in modules for parameter in dict.values(module._parameters)}
        strangers = [slot.param for slot in self.slots if id(slot.param) not in theirs]
        others = holders(strangers) if strangers else ()
        theirs |= {id(parameter) for module in others for parameter in dict.values(module._parameters)}
        for slot in self.slots:
            slot.held = id(slot.param) in theirs
        self._gates.guard([*modules, *others], lambda parameter: id(parameter) in self._by_param)
        if self._compiled is None and not self.strategy.learns:
            self._compiled = CompiledCalls(self._enter_compiled, self._leave_compiled, self._gates.any_in)
        if self._compiled is not None:
            self._compiled.watch(self.modules)

    def detach(self) -> None:
        """Remove all hooks and gates from the model."""
        self._gates.remove()
        if self._compiled is not None:
            self._compiled.remove()
        for handles in self._hooks.values():
            for handle in handles:
                handle.remove()
        self._hooks.clear()

    @property
    def modules(self) -> list[torch.nn.Module]:
        """The modules that hold parameters of this optimizer, and those around them."""
        return self._gates.modules

    def add_slots(self, slots: Sequence[Slot]) -> None:
        """Take on new parameters; they get buckets in the next step."""
        self.slots += slots
        self._by_param.update({id(slot.param): slot for slot in slots})
        self._gates.remove()
        self._guard()
        self._hook_slots()

    # - Calls of the script's

    def close(
        self, call: str, check: Callable[[], None] | None = None, *, again: bool = False, steps: bool = False
    ) -> bool:
        """See :meth:`.Closing.close`; hooks those parameters that were frozen and are not any more."""
        if not self.closing.ended:
            self._hook_slots()
        if self._gates.swapped:
            check = partial(self._refuse_swapped, check)
        return self.closing.close(call, check, again=again, steps=steps)

    def _refuse_swapped(self, check: Callable[[], None] | None) -> None:
        """Raise where the model has another parameter in place of one of ours, and nobody trains that one."""
        for parameters, name, old in self._gates.swapped:
            slot, new = self._by_param.get(id(old)), dict.get(parameters, name)
            if slot is None or new is None or not new.requires_grad or id(new) in self._by_param:
                continue
            if not current().registry.having([new]):
                raise RuntimeError(
                    f"the model has another parameter {slot.name!r} than the optimizer ({new.dtype} on {new.device}, and "
                    f"{old.dtype} on {old.device}), which no step would train: model.to('meta'), load_state_dict(…, "
                    "assign=True) and module.weight = nn.Parameter(…) make new ones. Do that before the optimizer is made, "
                    "or give the new parameter to add_param_group()"
                )
        if check is not None:
            check()

    def ask(self, call: str, clipped: Clipped) -> bool:
        """See :meth:`.Closing.ask`; raises on every rank where the policy refuses `call`."""
        return self.closing.ask(self.holds_gradients, call, clipped, partial(self.policy.refuse, call))

    def zero_grad(self, *, zeros: bool) -> None:
        """Drop the gradients, if the script has any."""
        self.closing.count()
        self._drop(zeros=zeros)

    def _drop(self, *, zeros: bool) -> None:
        if self.round.touched or self.accumulating or self.closing.closed:
            self.policy.arrive()  # the buffers of what was not used since are free then
            self.closing.drop(zeros=zeros)
        self.accumulating = False
        self.round.backwards = 0  # where these were passes for other optimizers, there was nothing to drop

    @contextmanager
    def sent_aside(self, *, zeros: bool) -> Iterator[None]:
        """A context in which no ``.grad`` stands for one that lies in shards; with `zeros`, it stands for zeros then."""
        stand = [
            slot
            for slot in self.slots
            if slot.freed is not None and (slot.param.grad is slot.freed.sent or slot.param.grad is slot.freed.zero)
        ]
        for slot in stand:
            slot.param.grad = None
        yield
        for slot in stand if zeros else ():
            assert slot.freed is not None
            slot.param.grad = torch.zeros_like(slot.param) if slot.converted else slot.freed.zero

    def _see_zero_grad(self) -> None:
        """``model.zero_grad()`` reads the parameters, and is about to drop all gradients there are."""
        call = zeroing(sys._getframe(2))
        if call is None:
            return
        modules = call.f_locals["self"].modules()
        members = {id(parameter) for module in modules for parameter in dict.values(module._parameters)}
        if not self.round.begun:
            self.round.backwards = 0
        elif all(id(slot.param) in members for slot in self.slots if slot.fires or slot.filled):
            self.closing.count(unseen=True)
            self._drop(zeros=not call.f_locals["set_to_none"])

    def _reader_drops_gradients(self) -> bool:
        """``model.zero_grad()`` after ``step()``, as in Hugging Face's Trainer, looks at no value, so it need not wait."""
        call = zeroing(sys._getframe(2))
        return call is not None and bool(call.f_locals["set_to_none"])

    def finish(self, given_up: Iterable[str]) -> None:
        """Finish training: wait for what is in flight.

        After a backward without a step, early updates end alike everywhere.

        Not where only some ranks ran it: their reductions, on one of the communicators `given_up`, never end.
        """
        if self._early is not None and self.open_step:
            if self.round.travels_on(given_up):
                return
            self.close("shutdown()")
            self._early.begin()
        self.transit.arrive_all()
        for told in self._on_ending:
            told()

    def retire(self) -> None:
        """End this engine: another optimizer has the parameters, or all ranks have dropped this one."""
        try:
            self.transit.arrive_all()
            self.round.abandon()
            if self.unsharder.active:
                self.unsharder.give_back(self.participants)
            for bucket in self.order:
                bucket.give_back()
        finally:  # also where ranks are lost
            self.detach()


def _hook(reference: weakref.ref[Engine], slot: Slot) -> Callable[[torch.Tensor], None]:
    """What a parameter holds does not hold the engine: the garbage collector cannot see through a parameter's hooks."""
    number = slot.index

    def hook(_param: torch.Tensor) -> None:
        engine = reference()
        if engine is None:
            return
        clock = engine._clock
        if clock is None:
            engine._gradient_ready(engine.slots[number])
        else:
            came = clock.now()
            engine._gradient_ready(engine.slots[number])
            clock.gradient(number, came)

    return hook


def _aside(reference: weakref.ref[Engine], slot: Slot) -> Callable[[torch.Tensor], None]:
    """What backward calls before it adds to ``.grad``, which may stand for one in shards. It holds no engine, either."""
    number = slot.index

    def before(_gradient: torch.Tensor) -> None:
        engine = reference()
        slot = None if engine is None else engine.slots[number]
        if slot is None or slot.freed is None or slot.put_aside():
            return
        if slot.filled and slot.param.grad is slot.freed.sent:
            raise too_many(slot)

    return before
