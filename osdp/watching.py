"""Measures what a rank takes in its first steps, keeps whole what fits under the limit, and looks on.

    first step │ two are measured, all is freed ─▶ plan ─▶ one that begins with it, two that check it │ settled
                                                    ▲                                               │      │
                                                    └───────── what was measured says another plan ─┘      │
                                                    └───────── a rank has taken more than the limit ───────┘

Every rank counts the same steps and tells the others what it took; the most that any took counts. Rank 0 decides.

[Note: the same heap] Gradients and activations leave holes in the C library's heap. Small blocks that stay are cut from
these, and the next gradient takes new memory: so a process grows for hundreds of steps, some MB at a time. Each step begins
with a heap whose holes have no pages, and takes what the steps that were measured took. Pages that are taken anew cost
time, so holes keep theirs once there is a plan, where the limit has room for as many bytes as all gradients have.
"""

from __future__ import annotations

import itertools
import logging
import statistics
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum, auto
from typing import Any

from torch.utils.hooks import RemovableHandle

from osdp.activations import Blocks
from osdp.choice import Choice, simulated, smallest
from osdp.job import Sized, TimedLayer, job_of
from osdp.memory_plan import FREE, GB, MARGIN, MemoryPlan, made, pinned_by
from osdp.search import DoesNotFit
from osdp.strategy import Osdp
from overlap.core.bucket import Bucket as Built
from overlap.core.buckets.heap import give_back
from overlap.core.engine import Engine
from overlap.features.replanning import Replanning
from overlap.job.memory.counted import Peak
from overlap.optimizer.distributed import DistributedOptimizer
from overlap.optimizer.explain import rows
from overlap.optimizer.layer_times import LayerTimes, durations
from overlap.plan.cost_model import CostModel
from overlap.plan.plan import Residency
from overlap.trace.picture import Row
from overlap.transport.communicator import Communicator
from overlap.transport.objects import agree, allgather_object

__all__ = ["Watching"]

log = logging.getLogger("dear")

_MEASURED = 2  # steps
_TRIES = 2  # more measurements before a limit is found to be too low
_CHECKS = 3  # other plans at most that follow from a check
_NEAR = MARGIN / 4  # of the limit: who comes so near to it frees more, before anything is above


class Phase(Enum):
    """The purpose of the current step."""

    FIRST = auto()  # the optimizer's state is made in it
    MEASURE = auto()
    BEGIN = auto()  # with a new plan
    CHECK = auto()
    SETTLED = auto()


class Watching:
    """The :class:`overlap.optimizer.distributed.Study` that keeps one optimizer under `limit` bytes on each rank.

    `costs`: of an all-reduce on these ranks, and on those that gather. `fsdp_plan`: rules for modules, where the script has
    any.
    """

    def __init__(
        self,
        comm: Communicator,
        engine: Engine,
        model: Any,
        strategy: Osdp,
        news: Replanning | None,
        limit: int,
        costs: tuple[CostModel, CostModel],
        fsdp_plan: Mapping[str, str] | None,
    ) -> None:
        self.plan: MemoryPlan | None = None  # in force
        self.measured: int | None = None  # bytes that a rank took at most with it
        self.seconds: float | None = None  # the median of steps with it …
        self.seconds_freed = 0.0  # … and of those before any
        self._comm, self._engine, self._model, self._strategy = comm, engine, model, strategy
        self._news, self._limit, self._costs, self._rules = news, limit, costs, fsdp_plan
        self._blocks = Blocks(model, False) if strategy.blocks is None else strategy.blocks
        self._phase, self._steps, self._checks, self._tries = Phase.FIRST, 0, 0, 0
        place = engine.round.comm.place
        self._peak = Peak(place=place)
        if place.type == "cpu":
            engine.unsharder.gradient_memory.limit = limit
        self._in_passes = self._in_step = 0  # the most bytes in this phase
        self._buckets: tuple[weakref.ref[Built], ...] = ()
        self._times: LayerTimes | None = None
        self._laps: list[Any] = []
        self._marks: list[float] = []
        self._mine: weakref.ref[DistributedOptimizer] | None = None
        self._handle: RemovableHandle | None = None

    def attach(self, optimizer: DistributedOptimizer) -> None:
        """Begin with the next step of `optimizer`, which has made none yet."""
        self._mine = weakref.ref(optimizer)
        self._handle = optimizer.register_step_pre_hook(self._stepping)
        optimizer._study(self)
        optimizer._planned = self

    @property
    def under_way(self) -> bool:
        return self._phase is not Phase.SETTLED

    @property
    def limit(self) -> int:
        """Bytes that this rank may take."""
        return self._limit

    @property
    def peak(self) -> int:
        """The most bytes that this rank took in a step since this phase began."""
        return max(self._in_passes, self._in_step)

    def explain(self, optimizer: DistributedOptimizer) -> str:
        """The plan in force, with what was measured of it. On any rank; raises ``RuntimeError`` before there is one."""
        plan = self._there()
        lines = [str(plan)]
        if self.measured is not None:
            lines.append(
                f"  measured  {self.measured / GB:.3f} GB, {100 * self.measured / plan.limit:.1f} % of the limit; steps "
                f"{1e3 * (self.seconds or 0.0):,.4g} ms, and {1e3 * self.seconds_freed:,.4g} when all were freed"
            )
        return "\n".join(lines)

    def rows(self, optimizer: DistributedOptimizer) -> list[Row]:
        """Two simulated steps."""
        plan = self._there()
        return rows(simulated(plan.job, *plan.choice))

    def _there(self) -> MemoryPlan:
        if self.plan is None:
            raise RuntimeError("there is no plan to explain: it is made from the first steps; make some more")
        return self.plan

    # - Steps

    def _stepping(self, *_: Any) -> None:
        """``step()`` begins: until now, passes have taken memory."""
        self._in_passes = max(self._in_passes, self._taken())
        self._peak.reset()

    def _taken(self) -> int:
        """The most bytes since the last look; of what lies once on this host, this rank's part."""
        return self._peak.read() - self._engine.unsharder.borrowed

    def __call__(self, optimizer: DistributedOptimizer, _args: Any, _kwargs: Any) -> None:
        """A step of `optimizer` ended. On every rank."""
        if self._mine is None or self._mine() is not optimizer:
            return
        self._in_step = max(self._in_step, self._taken())
        self._steps += 1
        self._go_on()
        if not self._has_room(self.peak):
            give_back()  # [Note: the same heap]
        self._peak.reset()

    def _has_room(self, taken: int) -> bool:
        """Whether holes in the heap may keep their pages: the plan is settled, and `taken` bytes leave room for them."""
        gradients = sum(bucket.nbytes for bucket in self._engine.unsharder.buckets)
        return self._phase is Phase.SETTLED and taken + gradients < self._near_limit

    @property
    def _near_limit(self) -> int:
        return int((1 - 4 * MARGIN) * self._limit)

    def _go_on(self) -> None:
        """This step is measured: what follows from it."""
        if self._others:
            self._begin(Phase.MEASURE)
        elif self._phase is Phase.SETTLED:
            self._look_on()
        elif self._phase in (Phase.FIRST, Phase.BEGIN):
            self._begin(Phase.MEASURE if self._phase is Phase.FIRST else Phase.CHECK)
        else:
            self._marks.append(time.perf_counter())
            if self._times is not None:
                self._laps.append(self._times.lap())
            if self._steps == _MEASURED:
                (self._decide if self._phase is Phase.MEASURE else self._check)()

    def _begin(self, phase: Phase) -> None:
        if self._times is not None:
            self._times.remove()
            self._times = None
            self._blocks.stop()
        if phase is Phase.MEASURE and self._others:
            self._buckets = tuple(map(weakref.ref, self._engine.unsharder.buckets))
            self.plan, self._checks, self._tries = None, 0, 0
            self._take_over(Choice((Residency.FREED,) * len(self._buckets)), ())
        if phase is Phase.MEASURE:
            unsharder = self._engine.unsharder
            self._times, self._laps = LayerTimes(self._model, lambda: unsharder.waited), []
            self._blocks.measure()
            optimizer = None if self._mine is None else self._mine()
            if optimizer is not None:
                weakref.finalize(optimizer, self._times.remove)  # the model may stay
                weakref.finalize(optimizer, self._blocks.end)
        self._phase, self._steps, self._marks = phase, 0, [time.perf_counter()]
        self._in_passes = self._in_step = 0

    @property
    def _others(self) -> bool:
        """Whether there are other buckets than those that were measured. The same on every rank."""
        return {bucket() for bucket in self._buckets} != set(self._engine.unsharder.buckets)

    @property
    def _median(self) -> float:
        return statistics.median(until - since for since, until in itertools.pairwise(self._marks))

    # - Decisions

    def _told(self) -> tuple[int, int]:
        """The most that any rank has taken, in passes and in steps, since this phase began."""
        told = allgather_object(self._comm, (self._in_passes, self._in_step))
        return max(each[0] for each in told), max(each[1] for each in told)

    def _decide(self) -> None:
        in_passes, in_step = self._told()
        passes = self._engine.round.passes
        saved = self._blocks.of_all(allgather_object(self._comm, self._blocks.measured(_MEASURED * passes)))
        found: list[TimedLayer] = []
        if self._times is not None:
            sizes = self._times.tensors
            found = [(name, *seconds, sizes[name]) for name, seconds in durations(self._laps).items()]
        layers, self.seconds_freed = agree(self._comm, (found, self._median))
        host = self._engine.unsharder.host
        on_host = min(allgather_object(self._comm, 0 if host is None else host.room))
        buckets = [_sized(bucket) for bucket in self._engine.unsharder.buckets]
        modules = tuple(each.modules for each in buckets)
        plan = MemoryPlan(
            job_of(
                buckets,
                layers,
                *self._costs,
                ranks=self._engine.unsharder.lane.size,
                room=self._engine.unsharder.room,
                passes=passes,
                saved=saved,
                per_host=1 if host is None else host.comm.size,
                on_host=on_host,
            ),
            (Residency.FREED,) * len(buckets),
            self._comm.size,
            self._limit,
            in_passes,
            in_step,
            modules,
            bool(layers),
            self._pinned(modules),
        )
        if self._engine.unsharder.gathers_once:  # what was measured has all of them
            kept = replace(plan, residencies=(Residency.FREED_IN_STEP,) * len(buckets))
            plan = replace(plan, in_passes=in_passes - kept.more)
        self._make(plan, strict=True)

    def _pinned(self, modules: Sequence[Sequence[str]]) -> Mapping[int, Residency]:
        """What is not to be chosen, by place: passes that share what they gather have it whole until the step."""
        pinned = {} if self._rules is None else pinned_by(self._rules, modules)
        if not self._engine.unsharder.gathers_once:
            return pinned
        if Residency.FREED in pinned.values():
            raise ValueError(
                "fsdp_plan has modules that are freed after each use, and a pipeline of several micro-batches has the "
                f"parameters of a stage whole in all of them: leave {FREE!r} out, or take chunks=1"
            )
        return dict.fromkeys(range(len(modules)), Residency.FREED_IN_STEP)

    def _make(self, plan: MemoryPlan, *, strict: bool = False) -> None:
        """Rank 0's plan for what is known by now, from the next step on. If none fits and it is `strict`, raise."""
        choice, problem = self._smallest(plan), ""
        if self._comm.rank == 0:
            try:
                choice = made(plan).choice
            except DoesNotFit as error:
                problem = str(error)
        names, recomputed, problem = agree(
            self._comm, ([each.name for each in choice.residencies], choice.recomputed, problem)
        )
        if problem and strict and self._tries < _TRIES:  # a rank that waits for another one takes more for once
            self._tries += 1
            self._begin(Phase.MEASURE)
            return
        if problem and strict:
            raise MemoryError(
                f"osdp, if {self._least(plan)}: {problem}. Take smaller batches, "
                f"{'' if plan.job.blocks else 'blocks to recompute, '}more ranks, a smaller threshold_mb or whole_mb, or a "
                "higher memory_limit_gb"
            )
        if problem and self._comm.rank == 0:
            log.warning("osdp: %s, and that is too much still: %s", self._least(plan), problem)
        choice = Choice(tuple(Residency[name] for name in names), tuple(recomputed))
        same = self.plan is not None and choice == self.plan.choice
        self.plan = replace(plan, residencies=choice.residencies, recomputed=choice.recomputed)
        if same:
            self._settle()
            return
        self._take_over(choice, self.plan.recomputed_blocks)
        self._begin(Phase.BEGIN)

    def _take_over(self, choice: Choice, again: Sequence[str]) -> None:
        buckets = self._engine.unsharder.buckets
        each = dict(zip(buckets, choice.residencies, strict=True))
        self._strategy.residencies = {slot.index: each[bucket] for bucket in buckets for slot in bucket.slots}
        self._engine.unsharder.arrange(each)
        self._blocks.switch(again)
        most = 0 if self.plan is None else self.plan.predicted_bytes
        memory, borrowed = self._engine.unsharder.gradient_memory, self._engine.unsharder.borrowed
        memory.high = min(most, self._near_limit) + borrowed
        if memory.limit is not None:
            memory.limit = self._limit + borrowed

    def _check(self) -> None:
        self._checks += 1
        plan = self._corrected(*self._told())
        self.seconds = agree(self._comm, self._median)
        if self._checks > _CHECKS and self.measured is not None and self.measured <= self._limit:
            self.plan = plan
            self._settle()
        else:
            self._make(plan)

    def _corrected(self, in_passes: int, in_step: int) -> MemoryPlan:
        """The plan in force, by what was measured with it."""
        plan = self._there()
        self.measured = max(in_passes, in_step)
        return replace(plan, in_passes=in_passes - plan.more, in_step=in_step - plan.on_host)

    def _settle(self) -> None:
        self._begin(Phase.SETTLED)
        unsharder = self._engine.unsharder
        if self.measured is not None and self._has_room(self.measured):
            unsharder.gradient_memory.high = self._near_limit + unsharder.borrowed
        if self._news is not None:
            self._news.forget()
        if self._comm.rank == 0 and log.isEnabledFor(logging.INFO) and self._mine is not None:
            optimizer = self._mine()
            if optimizer is not None:
                log.info("%s", self.explain(optimizer))

    def _look_on(self) -> None:
        """A rank that takes nearly the limit says so in the next step; then all free more. Else, if it takes more."""
        plan = self._there()
        kept = plan.choice != self._smallest(plan)
        over = self.peak > self._limit * ((1 - _NEAR) if kept else 1)
        if self._news is None:
            heard = over
        else:
            heard = self._news.heard
            self._news.wanted = over and not heard
        if heard:
            if self._news is not None:
                self._news.forget()
            told = self._told()
            if kept:
                self._make(self._corrected(*told))
            elif max(told) > (self.measured or 0):
                self._make(self._corrected(*told))  # which says so
            self._in_passes = self._in_step = 0

    def _smallest(self, plan: MemoryPlan) -> Choice:
        return smallest(plan.job, plan.pinned if self._engine.unsharder.gathers_once else None)

    def _least(self, plan: MemoryPlan) -> str:
        """What takes the fewest bytes, in words."""
        again = ", and blocks are computed again" if plan.job.blocks else ""
        if self._engine.unsharder.gathers_once:
            return f"all buckets are whole until the last micro-batch of a pipeline has used them{again}"
        return f"all buckets are freed after each use{again}"


def _sized(bucket: Built) -> Sized:
    modules = dict.fromkeys(slot.name.rpartition(".")[0] for slot in bucket.slots)
    return Sized(bucket.nbytes, len(bucket.slots), tuple(modules))
