"""Measures what a rank takes in its first steps, keeps whole what fits under the limit, and looks on.

    first step │ two are measured, all is freed ─▶ plan ─▶ one that begins with it, two that check it │ settled
                                                    ▲                                               │      │
                                                    └───────── what was measured says another plan ─┘      │
                                                    └───────── a rank has taken more than the limit ───────┘

Every rank counts the same steps and tells the others what it took; the most that any took counts. Rank 0 decides.
"""

from __future__ import annotations

import itertools
import logging
import statistics
import time
import weakref
from collections.abc import Mapping
from dataclasses import replace
from enum import Enum, auto
from typing import Any

from torch.utils.hooks import RemovableHandle

from osdp.choice import OPTIONS, Residencies
from osdp.job import Sized, TimedLayer, job_of
from osdp.memory_plan import GB, MemoryPlan, made, pinned_by
from osdp.search import DoesNotFit
from osdp.strategy import Osdp
from overlap.core.bucket import Bucket as Built
from overlap.core.engine import Engine
from overlap.features.replanning import Replanning
from overlap.job.memory import Peak
from overlap.optimizer.distributed import DistributedOptimizer
from overlap.optimizer.explain import rows
from overlap.optimizer.layer_times import LayerTimes, durations
from overlap.plan.cost_model import CostModel
from overlap.plan.plan import Residency
from overlap.plan.simulation.sharded import sharded
from overlap.trace.picture import Row
from overlap.transport.communicator import Communicator
from overlap.transport.objects import agree, allgather_object

__all__ = ["Watching"]

log = logging.getLogger("dear")

_MEASURED = 2  # steps
_TRIES = 2  # more measurements before a limit is found to be too low
_CHECKS = 3  # other plans at most that follow from a check


class Phase(Enum):
    """The purpose of the current step."""

    FIRST = auto()  # the optimizer's state is made in it
    MEASURE = auto()
    BEGIN = auto()  # with a new plan
    CHECK = auto()
    SETTLED = auto()


class Watching:
    """The :class:`overlap.optimizer.distributed.Study` that keeps one optimizer under `limit` bytes on each rank.

    `cost`: of an all-reduce on these ranks. `fsdp_plan`: rules for modules, where the script has any.
    """

    def __init__(
        self,
        comm: Communicator,
        engine: Engine,
        model: Any,
        strategy: Osdp,
        news: Replanning | None,
        limit: int,
        cost: CostModel,
        fsdp_plan: Mapping[str, str] | None,
    ) -> None:
        self.plan: MemoryPlan | None = None  # in force
        self.measured: int | None = None  # bytes that a rank took at most with it
        self.seconds: float | None = None  # the median of steps with it …
        self.seconds_freed = 0.0  # … and of those before any
        self._comm, self._engine, self._model, self._strategy = comm, engine, model, strategy
        self._news, self._limit, self._cost, self._rules = news, limit, cost, fsdp_plan
        self._phase, self._steps, self._checks, self._tries = Phase.FIRST, 0, 0, 0
        self._peak = Peak()
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
        stay, keep = ([n for n, each in enumerate(plan.residencies) if each is wanted] for wanted in OPTIONS[1:])
        job = plan.job
        return rows(sharded(job.work, job.network, job.buckets, room=job.room, stay=stay, keep=keep, passes=job.passes))

    def _there(self) -> MemoryPlan:
        if self.plan is None:
            raise RuntimeError("there is no plan to explain: it is made from the first steps; make some more")
        return self.plan

    # - Steps

    def _stepping(self, *_: Any) -> None:
        """``step()`` begins: until now, passes have taken memory."""
        self._in_passes = max(self._in_passes, self._peak.read())
        self._peak.reset()

    def __call__(self, optimizer: DistributedOptimizer, _args: Any, _kwargs: Any) -> None:
        """A step of `optimizer` ended. On every rank."""
        if self._mine is None or self._mine() is not optimizer:
            return
        self._in_step = max(self._in_step, self._peak.read())
        self._peak.reset()
        self._steps += 1
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
        if phase is Phase.MEASURE and self._others:
            self._buckets = tuple(map(weakref.ref, self._engine.unsharder.buckets))
            self.plan, self._checks, self._tries = None, 0, 0
            self._take_over((Residency.FREED,) * len(self._buckets))
        if phase is Phase.MEASURE:
            self._times, self._laps = LayerTimes(self._model), []
            optimizer = None if self._mine is None else self._mine()
            if optimizer is not None:
                weakref.finalize(optimizer, self._times.remove)  # the model may stay
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
        found: list[TimedLayer] = []
        if self._times is not None:
            sizes = self._times.tensors
            found = [(name, *seconds, sizes[name]) for name, seconds in durations(self._laps).items()]
        layers, self.seconds_freed = agree(self._comm, (found, self._median))
        buckets = [_sized(bucket) for bucket in self._engine.unsharder.buckets]
        modules = tuple(each.modules for each in buckets)
        plan = MemoryPlan(
            job_of(
                buckets,
                layers,
                self._cost,
                ranks=self._comm.size,
                room=self._engine.unsharder.room,
                passes=self._engine.round.passes,
            ),
            (Residency.FREED,) * len(buckets),
            self._comm.size,
            self._limit,
            in_passes,
            in_step,
            modules,
            bool(layers),
            {} if self._rules is None else pinned_by(self._rules, modules),
        )
        self._make(plan, strict=True)

    def _make(self, plan: MemoryPlan, *, strict: bool = False) -> None:
        """Rank 0's plan for what is known by now, from the next step on. If none fits and it is `strict`, raise."""
        codes: list[int] | None = None
        problem = ""
        if self._comm.rank == 0:
            try:
                codes = [OPTIONS.index(each) for each in made(plan).residencies]
            except DoesNotFit as error:
                problem = str(error)
        codes, problem = agree(self._comm, (codes, problem))
        if problem and strict and self._tries < _TRIES:  # a rank that waits for another one takes more for once
            self._tries += 1
            self._begin(Phase.MEASURE)
            return
        if problem and strict:
            raise MemoryError(
                f"osdp, if all buckets are freed after each use: {problem}. Take smaller batches, activation checkpoints, "
                "more ranks, a smaller threshold_mb or whole_mb, or a higher memory_limit_gb"
            )
        if problem and self._comm.rank == 0:
            log.warning("osdp: all buckets are freed after each use, and that is too much still: %s", problem)
        residencies = plan.residencies if codes is None else tuple(OPTIONS[code] for code in codes)
        if problem:
            residencies = (Residency.FREED,) * len(residencies)
        same = self.plan is not None and residencies == self.plan.residencies
        self.plan = replace(plan, residencies=residencies)
        if same:
            self._settle()
            return
        self._take_over(residencies)
        self._begin(Phase.BEGIN)

    def _take_over(self, residencies: Residencies) -> None:
        buckets = self._engine.unsharder.buckets
        each = dict(zip(buckets, residencies, strict=True))
        self._strategy.residencies = {slot.index: each[bucket] for bucket in buckets for slot in bucket.slots}
        self._engine.unsharder.arrange(each)

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
        return replace(plan, in_passes=in_passes - plan.more, in_step=in_step)

    def _settle(self) -> None:
        self._begin(Phase.SETTLED)
        if self._news is not None:
            self._news.forget()
        if self._comm.rank == 0 and log.isEnabledFor(logging.INFO) and self._mine is not None:
            optimizer = self._mine()
            if optimizer is not None:
                log.info("%s", self.explain(optimizer))

    def _look_on(self) -> None:
        """A rank that takes more than the limit says so in the next step; then all free more."""
        over = max(self._in_passes, self._in_step) > self._limit
        if self._news is None:
            heard = over
        else:
            heard = self._news.heard
            self._news.wanted = over and not heard
        if heard:
            if self._news is not None:
                self._news.forget()
            told = self._told()
            if any(each is not Residency.FREED for each in self._there().residencies):
                self._make(self._corrected(*told))
            elif max(told) > (self.measured or 0):
                self._make(self._corrected(*told))  # which says so
            self._in_passes = self._in_step = 0


def _sized(bucket: Built) -> Sized:
    modules = dict.fromkeys(slot.name.rpartition(".")[0] for slot in bucket.slots)
    return Sized(bucket.nbytes, len(bucket.slots), tuple(modules))
