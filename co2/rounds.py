"""Rounds of local steps, and the average of each on its way while the next one runs.

    compute | round 0: τ local steps | round 1: τ local steps     | round 2
    comm                              | RS gap AG of round 0's end | RS gap AG of round 1's end
                                     [1]                          [2]
    [1] parameters are sent as they are, and go back to where the round began: nothing has arrived yet
    [2] parameters become what round 0's average led to; round 1's, sent now, counts one round later

A rule that waits (`co2.equations`) has its average in place of that: it is sent, awaited, and training goes on from it.

Whoever owns a shard makes its outer step between reduce-scatter and all-gather, on the round's own thread, so that no
rank's main thread is needed for a round to be completed once every rank has begun it. Ranks agree by counting: the
channel carries rounds alone, and each is sent only when the one before has arrived.

[Note: one round ahead]
A round is averaged only when all ranks have sent it. So a rank that asks the others for their shares, having seen its own
last round arrive, finds them past the same event or past one more, whose average has not been made: they answer with
where they were before it.

[Note: who has loaded by when]
load() waits for nobody: Horovod's scripts load on rank 0 alone and broadcast afterwards. A rank that has loaded keeps all
it loaded until its next event, and asks nobody; and it keeps the share it had before, which is the answer for those who
have not loaded. They all have once a round that it sent afterwards has come back.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from functools import partial
from typing import Any

import torch

from co2.averaged_parameters import AveragedParameters, Batch
from co2.communication import RoundCommunication, RoundThread, agree_on_events
from co2.equations import OuterRule, Shared
from co2.inner_rates import InnerRates
from co2.join import JoinRefusal
from co2.lateness import Lateness
from co2.outer_state import ShareQuery, assemble, check_shapes
from co2.part import Part, Shares, as_real, make_parts
from co2.schedule import Event, Schedule, Standing
from overlap.core.bucket import Slot
from overlap.transport.broadcast import overwrite
from overlap.transport.communicator import Communicator
from overlap.transport.objects import allgather_object
from overlap.transport.peer_queries import PeerQueries

__all__ = ["Rounds"]


log = logging.getLogger("dear")

_LOOK_SECONDS = 1.0


class _Phase(Enum):
    TRAINING = auto()
    RETIRED = auto()  # for good: the optimizer is dropped, or another one has its parameters


class Rounds:
    """The outer half of one optimizer over `slots`, a list that may grow. `comm` carries nothing else."""

    _COUNTERS: tuple[str, ...] = ("steps", "in_round", "events")  # in a checkpoint

    def __init__(
        self,
        comm: Communicator,
        slots: list[Slot],
        schedule: Schedule,
        rule: OuterRule,
        make_part: Callable[..., Part],
        refusal: JoinRefusal,
        peer_queries: PeerQueries,
        inner_rates: Callable[[], Mapping[int, float]],
    ) -> None:
        """`inner_rates`: learning rates now, by slot."""
        self._comm, self._slots, self.schedule, self.rule = comm, slots, schedule, rule
        self._make_part, self._inner_rates = make_part, InnerRates(inner_rates)
        self.refusal, self._peer_queries = refusal, peer_queries
        self._changed = threading.Lock()  # around changes of what the others may ask for
        self._communication = RoundCommunication(comm, rule, self._changed, self._met)
        self._query = ShareQuery(peer_queries, refusal.topic, [rank for rank in range(comm.size) if rank != comm.rank])
        self._before_load: tuple[int, Shares] | None = None  # [Note: who has loaded by when], after so many events
        self.pace = self._communication.pace
        self._lateness = Lateness(comm.rank, *schedule.hiding)
        self._thread: RoundThread | None = None
        self._phase = _Phase.TRAINING
        self._sent, self._last_sent = 0, Event.NOTHING  # in all, whatever is loaded meanwhile
        self._rested: frozenset[int] = frozenset()
        self._forget()
        peer_queries.on(refusal.topic, self._answer)

    def _forget(self) -> None:
        self.parts: list[Part] = []
        self._averaged = AveragedParameters(self._slots)
        self.steps = self.in_round = 0
        self.events = self.refusal.events = 0  # averages and rounds so far, the same on all ranks
        self._last = Event.NOTHING
        self._communication.longest = 0.0
        self._inner_rates.begin_round()
        self._since, self._waited = time.perf_counter(), 0.0  # seconds, of which a wait is no step's time

    # - A step

    def local_update(self, update: Callable[[torch.optim.Optimizer], Any]) -> Callable[[torch.optim.Optimizer], Any]:
        """What a local step does once gradients are there: `update`, the user's optimizer's, if no rule says otherwise."""
        return update

    @torch.inference_mode(False)
    def begin(self) -> None:
        """Before every step: parameters that are trained for the first time are taken in. All ranks hold them alike."""
        if self._phase is _Phase.RETIRED:
            return  # the step is going to raise
        if self._thread is not None and self._awaits(self._last_sent):
            self.arrive()  # it was refused to wait for it, as a rank had joined, and all have come back since
        for part in self.parts:
            part.check()
        trained = [slot.index for slot in self._slots if slot.param.requires_grad]
        fresh = self._averaged.fresh(trained)
        if fresh:
            with self._changed:
                self._take_in(fresh)
        self._averaged.train(trained)

    def _take_in(self, batch: Batch) -> list[Part]:
        divided = [[self._slots[index] for index in together] for together in self._together(batch)]
        rank, size = self._comm.rank, self._comm.size
        parts = [part for slots in divided for part in make_parts(slots, rank, size, self._make_part)]
        self.parts += parts
        self._averaged.take_in(batch)
        return parts

    def _together(self, batch: Batch) -> list[Batch]:
        """Slots of `batch` that rounds concern together."""
        return [batch]

    def _due(self) -> Event:
        """What follows the step just made."""
        return self.schedule.after(self.steps, self.in_round)

    def stepped(self) -> None:
        """After every step, also one that was skipped for its infinities: what the schedule says.

        Raises ``RuntimeError`` where another optimizer has the parameters.
        """
        if self._phase is _Phase.RETIRED:
            raise RuntimeError(
                "the parameters of this co2 optimizer went to another one that was made later, here or on another rank: "
                "step that one"
            )
        self.steps, self.in_round = self.steps + 1, self.in_round + 1
        if self.rule.needs_inner_lr:
            self._inner_rates.stepped()
        event = self._due()
        if event is Event.ROUND:
            self.pace.stepped((time.perf_counter() - self._since - self._waited) / self.in_round)
        if event is not Event.NOTHING:
            self.refusal.refuse_to_send(self.events)
            self.arrive(in_step=True)
            idle = self._averaged.idle
            if self._awaits(event):
                self._average(idle if isinstance(self.rule, Shared) else frozenset(), event)
            else:
                self._turn(idle)

    def _awaits(self, event: Event) -> bool:
        """Whether training goes on only when it has arrived."""
        return event is Event.AVERAGE or self.rule.waits

    def _send(self, thread: RoundThread, event: Event, idle: frozenset[int]) -> None:
        self._thread = thread
        self._sent, self._last_sent, self._rested = self._sent + 1, event, idle

    def _close(self, event: Event, idle: frozenset[int]) -> None:
        parts = self._concerned() if event is Event.ROUND else self.parts
        self._averaged.close(event, idle, frozenset(slot.index for part in parts for slot in part.slots))
        self._last = event
        self.events, self.in_round = self.events + 1, 0
        self.refusal.events = self.events
        self._inner_rates.begin_round()
        self._since, self._waited = time.perf_counter(), 0.0

    def _met(self) -> None:
        self._before_load = None  # [Note: who has loaded by when]

    # - A round

    def _concerned(self) -> list[Part]:
        """The parts of the current round."""
        return list(self.parts)

    def _travelling(self, idle: frozenset[int], event: Event) -> list[str]:
        """What has to be the same on all ranks for `event`."""
        return self._averaged.travelling(idle)

    @property
    def waits(self) -> bool:
        """Whether every round is waited for."""
        return self.rule.waits

    @property
    def exchanged_bytes(self) -> int:
        """How many a reduce-scatter and an all-gather of a round carry, each."""
        return sum(part.exchanged_bytes for part in self.parts)

    def _turn(self, idle: frozenset[int]) -> None:
        kept, trained = self._averaged.kept(idle), self._travelling(idle, Event.ROUND)
        parts = self._concerned()
        sent = [part for part in parts if not part.rests(idle)]
        with self._changed:
            for part in parts:
                part.turn(idle, kept)
            self._close(Event.ROUND, idle)
        work = partial(self._communication.carry, parts, sent, idle, trained)
        self._send(RoundThread(self.events - 1, work), Event.ROUND, idle)

    def arrive(self, *, in_step: bool = False) -> None:
        """Wait for the round on its way. Raises :class:`CannotJoin` if a rank has joined meanwhile."""
        thread = self._thread
        if thread is None:
            return
        now = time.perf_counter()
        late = not thread.done
        while not thread.wait(_LOOK_SECONDS):
            self.refusal.refuse(thread.event)
        self._thread = None
        thread.land()
        if in_step and late:
            self._lateness.note(time.perf_counter() - now, now - self._since)
        self._waited += time.perf_counter() - now

    # - An average that is waited for

    def average(self, control: Communicator) -> None:
        """Every rank goes on from the mean of all, and from what is on its way. On every rank; see the optimizer's method.

        Raises ``RuntimeError`` on every rank where they have not come to the same round.
        """
        agree_on_events(control, self.events)
        self.begin()
        self.arrive()
        idle: frozenset[int] = frozenset()
        if isinstance(self.rule, Shared):
            written = allgather_object(control, self._averaged.written_in(self.parts))
            idle = self._averaged.idle - frozenset().union(*written)
        self._average(idle, Event.AVERAGE)  # else ranks have parameters of their own, of idle slots, too

    def _average(self, idle: frozenset[int], event: Event) -> None:
        """Go on from the mean of all ranks; or, of a round, from where that leads to by a rule that waits."""
        self._send_average(idle, event)
        self.arrive()

    def _send_average(self, idle: frozenset[int], event: Event) -> None:
        kept, outer = self._averaged.kept(idle), event is Event.ROUND
        sent = [part for part in self.parts if not part.rests(idle)]
        with self._changed:
            for part in self.parts:
                part.adopt(kept)
        for part in sent:
            part.load_average()
        shards: dict[Part, torch.Tensor] = {}
        rates = self._inner_rates.mean() if outer and self.rule.needs_inner_lr else {}
        parts, trained = list(self.parts), self._travelling(idle, event)

        def outcome(part: Part) -> torch.Tensor:
            return part.advance(idle, rates) if outer else part.blend(idle)

        def landed() -> None:
            with self._changed:
                for part in parts:
                    part.unpack(kept)
                    if part in shards:
                        part.restart(shards[part])
                        continue
                    if outer:
                        part.rest()
                    part.restart(part.next)
                self._close(Event.AVERAGE, idle)

        work = partial(self._communication.carry_average, sent, trained, shards, outcome)
        self._send(RoundThread(self.events, work, landed), event, idle)

    # - The end

    @property
    def standing(self) -> Standing:
        return Standing(self._sent, self._last_sent, self._rested, tuple(self._averaged.batches))

    @torch.inference_mode(False)
    def finish(self, last: Standing) -> None:
        """Training ends: a round on its way arrives. What the rank that stands furthest, at `last`, sent is sent here, too:
        all but what had rested there, whatever this rank trained since its own last event. Parameters stay as they are."""
        behind = last.sent > self._sent
        if not behind and not (self._thread is not None and self._awaits(self._last_sent)):
            self.arrive()
            return
        params = [as_real(slot.param) for slot in self._slots]
        values = [param.clone() for param in params]
        self.arrive()
        if behind:
            self._send_as_it_is(last)
        for param, value in zip(params, values, strict=True):
            overwrite(param, value)

    def _send_as_it_is(self, last: Standing) -> None:
        log.warning("co2: rank %d ends one round before others; it sends that round as it is", self._comm.rank)
        with self._changed:
            for batch in last.batches[len(self._averaged.batches) :]:
                self._take_in(batch)
        if self._awaits(last.event):
            self._send_average(last.rested, last.event)
        else:
            self._turn(last.rested)
        self.arrive()

    # - State

    def _answer(self, _sender: int, events: int) -> Shares | None:
        """This rank's shares after so many events, for another rank; None if it has not come there."""
        with self._changed:
            if self._before_load is not None and self._before_load[0] == events:
                return self._before_load[1]
            ahead = self.events - events
            if ahead < 0:
                return None
            if ahead > 1 or (ahead == 1 and self._last is not Event.ROUND):
                raise RuntimeError(f"asked for the outer state after event {events}, this rank is at {self.events}")
            return self._shares(passed=ahead == 1)  # [Note: one round ahead]

    def _shares(self, *, passed: bool) -> Shares:
        return {index: value for part in self.parts for index, value in part.share(passed=passed).items()}

    def collect(self) -> dict[str, Any]:
        """The outer state of all ranks, as a checkpoint has it. On any subset of ranks."""
        self.arrive()
        shares = self._query.ask(self.events) if any(part.moved_on for part in self.parts) else []
        with self._changed:
            shares = [self._shares(passed=False), *shares]
            outer, beside = assemble(self.parts, shares), self._beside(shares)
        counters = {name: getattr(self, name) for name in self._COUNTERS}
        counters |= {"longest": self._communication.longest, "outer": self.rule.name}
        return {"parameters": outer, **counters, **self._averaged.state(), **self._inner_rates.state(), **beside}

    def _beside(self, shares: Sequence[Shares]) -> dict[str, Any]:
        """What else ranks have a share of."""
        return {}

    def load(self, section: dict[str, Any] | None, inner: Mapping[int, Mapping[str, Any]] | None = None) -> None:
        """Go on from what :meth:`collect` gave; without it, from the parameters as they are at the next step.

        `inner`: the state of the user's optimizer, by slot, which has been given to it, in the parameters' types.
        """
        if section is not None:
            saved = section.get("outer", "co2")
            if saved != self.rule.name:
                raise ValueError(
                    f"the outer state was saved with outer={saved!r}, and this optimizer has outer={self.rule.name!r}: "
                    "leave it out, and a round begins at the parameters as they are"
                )
            check_shapes(self._slots, section["parameters"])
        self.arrive()
        with self._changed:
            if self._before_load is None:
                self._before_load = self.events, self._shares(passed=False)
            self._forget()
            if section is None:
                return
            outer = section["parameters"]
            for batch in section.get("batches", [sorted(outer)]):  # as they were, for the same sums
                for part in self._take_in(tuple(batch)):
                    part.load(outer)
            self._averaged.load(section)
            self._inner_rates.load(section)
            vars(self).update({name: section[name] for name in self._COUNTERS})
            self.refusal.events = self.events
            self._communication.longest = section["longest"]

    # - Whose parameters they are: see `co2.lifetime`

    def has(self, parameters: Sequence[torch.Tensor]) -> bool:
        held = {id(slot.param) for slot in self._slots}
        return self._phase is _Phase.TRAINING and any(id(parameter) in held for parameter in parameters)

    def retire(self) -> None:
        """Nobody steps any more. What is on its way arrives, which every rank has sent, and is dropped."""
        self._phase = _Phase.RETIRED
        if self._thread is not None:
            self._thread.end()
        self._thread, self.parts = None, []
        self._peer_queries.off(self.refusal.topic)
