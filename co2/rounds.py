"""Rounds of local steps; while one round runs, the one before it is averaged.

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

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from co2.averaged_parameters import AveragedParameters, Batch
from co2.communication import GRADIENTS_WAIT, Met, RoundCommunication, RoundThread, Told, agree_on_events
from co2.equations import OuterRule, Shared
from co2.inner_rates import InnerRates
from co2.join import Following
from co2.outer_state import ShareQuery, assemble, check_shapes
from co2.pace import Lateness
from co2.part import Contributors, Part, Shares, as_real, make_parts
from co2.schedule import Event, Schedule, Standing
from overlap.core.bucket import Slot
from overlap.core.step import hyper_parameters, take_hyper_parameters
from overlap.job.regrouping import RanksChange
from overlap.job.session import current
from overlap.transport.broadcast import overwrite
from overlap.transport.communicator import Communicator
from overlap.transport.objects import allgather_object
from overlap.transport.peer_queries import PeerQueries

__all__ = ["Rounds"]


log = logging.getLogger("dear")


class Rounds:
    """The outer steps of one optimizer over `slots`, a list that may grow. `comm` carries nothing else."""

    _COUNTERS: tuple[str, ...] = ("steps", "in_round", "events")  # that are saved

    #: What a local step does once gradients are there; None: the user's optimizer steps.
    local_update: Callable[[torch.optim.Optimizer], Any] | None = None

    def __init__(
        self,
        comm: Communicator,
        slots: list[Slot],
        schedule: Schedule,
        rule: OuterRule,
        make_part: Callable[..., Part],
        following: Following,
        peer_queries: PeerQueries,
        inner_rates: Callable[[], Mapping[int, float]],
    ) -> None:
        """`inner_rates`: learning rates now, by slot."""
        self._comm, self._slots, self.schedule, self.rule = comm, slots, schedule, rule
        self.slots: Sequence[Slot] = slots
        self._make_part, self._inner_rates = make_part, InnerRates(inner_rates)
        self.following, self._peer_queries = following, peer_queries
        following.bind(self)
        self._changed = threading.Lock()  # around changes of what the others may ask for
        roster = current().roster
        self._communication = RoundCommunication(
            comm, rule, self._changed, self._forget_loaded, lambda: roster is not None and roster.somebody_waits
        )
        others = [rank for rank in range(comm.size) if rank != comm.rank]
        self._query = ShareQuery(peer_queries, following.topic, others)
        self.pace = self._communication.pace
        self._lateness = Lateness(comm.rank, *schedule.hiding)
        self._thread: RoundThread | None = None
        self.retired = False  # for good: the optimizer is dropped, or another one has its parameters
        self._known: Met | None = None  # what is known of the next event before it is sent, where this rank has joined
        self._sent, self._last_sent = 0, Event.NOTHING  # in all, whatever is loaded meanwhile
        self._rested: frozenset[int] = frozenset()
        self._before_load: tuple[int, Shares] | None = None  # [Note: who has loaded by when], after so many events
        self._forget()
        peer_queries.on(following.topic, self._answer)

    def _forget(self) -> None:
        self.parts: list[Part] = []
        self._averaged = AveragedParameters(self._slots)
        self.steps = self.in_round = 0
        self.events = 0  # averages and rounds so far, the same on all ranks
        self._last = Event.NOTHING
        self._communication.longest = 0.0
        self._inner_rates.begin_round()
        self._since, self._waited = time.perf_counter(), 0.0  # seconds, of which a wait is no step's time

    # - A step

    @torch.inference_mode(False)
    def begin(self) -> None:
        """Before every step, take in parameters that are trained for the first time. All ranks hold them alike."""
        self.following.end()
        if self.retired:
            return  # the step is going to raise
        current().heed()
        if self._thread is not None and self._awaits(self._last_sent):
            self.arrive()  # whoever waited for it was interrupted
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
        """Do what the schedule says, after every step, also one that was skipped for its infinities.

        Raises ``RuntimeError`` where another optimizer has the parameters.
        """
        if self.retired:
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
            self.arrive(in_step=True)
            self._let_in()
            self._make(event, self._averaged.idle)

    def _make(self, event: Event, idle: frozenset[int]) -> None:
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
        self._inner_rates.begin_round()
        self._since, self._waited = time.perf_counter(), 0.0

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
        """The number of bytes that a reduce-scatter and an all-gather of a round carry, each."""
        return sum(part.exchanged_bytes for part in self.parts)

    def _turn(self, idle: frozenset[int]) -> None:
        kept, meet = self._averaged.kept(idle), self._meeting(idle, Event.ROUND, {})
        parts = self._concerned()
        sent = [part for part in parts if not part.rests(idle)]
        with self._changed:
            for part in parts:
                part.turn(idle, kept)
            self._close(Event.ROUND, idle)
        work = partial(self._communication.carry, parts, sent, idle, meet)
        self._send(RoundThread(work), Event.ROUND, idle)

    def arrive(self, *, in_step: bool = False) -> None:
        """Wait for the round in flight."""
        thread = self._thread
        if thread is None:
            return
        now = time.perf_counter()
        late = not thread.done
        thread.wait()
        self._thread = None
        thread.land()
        if in_step and late:
            self._lateness.note(time.perf_counter() - now, now - self._since)
        self._waited += time.perf_counter() - now

    def _meeting(self, idle: frozenset[int], event: Event, rates: Mapping[int, float]) -> Callable[[], Met]:
        """What the thread of an event begins with. A rank that has joined knows by then how all take part."""
        if self._known is not None:
            known, self._known = self._known, None
            return lambda: known
        batches, groups = tuple(self._averaged.batches), hyper_parameters(self.following.optimizer)
        trainable = frozenset(slot.index for slot in self._slots if slot.param.requires_grad)
        told = Told(event, self.steps, idle, batches, trainable, groups, dict(rates))
        return partial(self._communication.meet, self._travelling(idle, event), told)

    # - On a rank that is out of data: see `co2.join`

    @torch.inference_mode(False)
    def take_part(self) -> bool:
        """Do what the others do at their next event, with no local steps. False: all have joined, so that there is none."""
        self.arrive()
        idle = self._averaged.idle
        learned = not all(part.rests(idle) for part in self._concerned())
        trained = self._travelling(idle, Event.ROUND) if learned else None
        try:
            met, told = self._communication.meet_joined(trained)
        except ValueError:
            self._sent += 1  # as the others, who raise for what they have sent
            raise
        if told is None:
            for part in self.parts:
                part.among = Contributors(self._comm.size)
            return False
        self._take_over(told)
        self._known = met
        self._make(told.event, told.idle)
        self.arrive()
        return True

    def _take_over(self, told: Told) -> None:
        """What this rank has missed."""
        with self._changed:
            for batch in told.batches[len(self._averaged.batches) :]:
                self._take_in(batch)
        for slot in self._slots:
            slot.param.requires_grad_(slot.index in told.trainable)
        take_hyper_parameters(self.following.optimizer, told.hyper_parameters)
        self._inner_rates.take_over(told.rates)
        self.steps = told.steps

    def _let_in(self) -> None:
        """Raise :class:`RanksChange`, on every rank, if all know since the last event that somebody waits to come in."""
        if self._communication.somebody_waits:
            raise RanksChange("a rank has come, and waits for the others")

    # - An average that is waited for

    def average(self, control: Communicator, *, waiting: bool) -> None:
        """Have every rank go on from the mean of all, and from what is in flight. On every rank; see the optimizer's.

        `waiting`: this rank has gradients that no step has used.
        """
        self.following.end()
        agree_on_events(self.following.call("average_parameters()", GRADIENTS_WAIT if waiting else self.events))
        self.begin()
        self.arrive()
        self._let_in()
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
        parts, meet = list(self.parts), self._meeting(idle, event, rates)

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

        work = partial(self._communication.carry_average, sent, meet, shards, outcome)
        self._send(RoundThread(work, landed), event, idle)

    # - State, as a checkpoint sees it, from anywhere between two steps

    def _forget_loaded(self) -> None:
        self._before_load = None  # [Note: who has loaded by when]

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
        self.following.end()
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
        self.following.end()
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
            self._communication.longest = section["longest"]

    # - Where ranks are lost: see `co2.recovery`

    def left(self) -> dict[str, Any]:
        """What is left of these rounds when ranks are lost. What was on its way has failed, and is dropped."""
        with contextlib.suppress(Exception):
            self.following.wait()
        if self._thread is not None:
            self._thread.wait()
        self._thread = None
        return {
            "outer": self.rule.name,
            "names": [slot.name for slot in self._slots],
            "batches": [list(batch) for batch in self._averaged.batches],
            "steps": self.steps,
            "longest": self._communication.longest,
        }

    def begin_at(self, left: Mapping[str, Any]) -> None:
        """Begin a round with the outer state that others have `left`. On every rank; none has made a step yet."""
        start = {
            **dict.fromkeys(self._COUNTERS, 0),
            "pending": False,
            "active": [],
            "coming": [],
            "outer": self.rule.name,
        }
        self.load({**start, **left})
        self._forget_loaded()

    # - The end

    @property
    def standing(self) -> Standing:
        batches = tuple(self._averaged.batches)
        return Standing(self._sent, self._last_sent, self._rested, batches, self.following.under_way)

    @torch.inference_mode(False)
    def finish(self, said: Standing, last: Standing, joined: bool) -> None:
        """Finish training: a round in flight arrives.

        What the rank that stands furthest, at `last`, sent is sent here, too: all but what had rested there, whatever
        this rank trained since its own last event. Parameters stay as they are.

        `said`: what this rank has told the others of itself. `joined`: some ranks have, and end with the others.
        """
        if said.joined:  # so the others end it: they may have done by now
            self.following.wait()
            return
        self._finish(last)
        if joined:
            self._communication.meet_joined(None)

    def _finish(self, last: Standing) -> None:
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

    # - Whose parameters they are: see `co2.lifetime`

    def has(self, parameters: Sequence[torch.Tensor]) -> bool:
        held = {id(slot.param) for slot in self._slots}
        return not self.retired and any(id(parameter) in held for parameter in parameters)

    def retire(self) -> None:
        """End these rounds, since nobody steps any more.

        What is on its way arrives, which every rank has sent, and is dropped.
        """
        self.retired = True
        if self._thread is not None:
            self._thread.end()
        self._thread, self.parts = None, []
        self._peer_queries.off(self.following.topic)
