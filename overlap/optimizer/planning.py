"""Plans buckets by itself: measures some steps, simulates what the buckets should be, and looks again later.

    first step │ one that warms up │ some are measured ─▶ plan ─▶ one that warms up, some that check it │ settled
                                     ▲                                                                     │
                                     └───────── steps have become longer or shorter: rank 0 says so ◀──────┘

Buckets that change meanwhile (parameters were converted, or came late) begin it anew: what was measured was of others.

A plan that turns out slower is compared with the earlier one once more, which comes back for some steps: where these have
become as slow, something else was, and the plan stays.

Every rank counts the same steps, measures, and takes over what rank 0 has decided. No rank acts on what it measured alone.
"""

from __future__ import annotations

import logging
import statistics
import time
import weakref
from collections import deque
from enum import Enum, auto
from itertools import pairwise
from typing import Any

from torch.utils.hooks import RemovableHandle

from overlap.core.bucket import Bucket
from overlap.core.clock import StepClock
from overlap.core.engine import Engine
from overlap.features.replanning import Replanning
from overlap.job.groups import beside
from overlap.job.process_set import ProcessSet
from overlap.job.session import current
from overlap.optimizer.decision import Report, decided, in_a_line, layers_of, link_of, work_of
from overlap.optimizer.distributed import DistributedOptimizer
from overlap.optimizer.explain import NO_PLAN, Explained, explanation, rows
from overlap.plan.choice import Job, simulated
from overlap.plan.link_probe import start_cost
from overlap.plan.plan import Updates
from overlap.plan.simulation.events import Run
from overlap.plan.simulation.network import Fitted
from overlap.plan.simulation.workload import Workload
from overlap.plan.strategy import PlannedStrategy
from overlap.trace.picture import Row
from overlap.transport.communicator import Communicator
from overlap.transport.objects import agree
from overlap.transport.stamps import Stamp

__all__ = ["Planning", "plan_by_itself"]

log = logging.getLogger("dear")

_MEASURED = 3  # steps, whose medians count
_WORSE = 1.02  # a new plan is taken back where steps then take more than this share of what they took before
_WATCHED = 9  # steps whose median is compared with what was measured when the plan was made
_CHANGED = 1.25  # by which factor it has to be longer or shorter for another look
_PAUSE = 10  # steps after a plan before the next look, doubled by each look that changes nothing
_LONGEST_PAUSE = 640


class Phase(Enum):
    """The purpose of the current steps."""

    FIRST = auto()  # buckets are made in it
    WARM_UP = auto()
    MEASURE = auto()
    CHECK_WARM_UP = auto()
    CHECK = auto()
    EARLIER_WARM_UP = auto()
    EARLIER = auto()  # the earlier plan is measured again, as the new one has turned out slower
    SETTLED = auto()
    ENDED = auto()  # the script has chosen buckets itself, or there was nothing to measure


_NEXT = {
    Phase.FIRST: {Phase.WARM_UP, Phase.ENDED},
    Phase.WARM_UP: {Phase.MEASURE, Phase.ENDED},
    Phase.MEASURE: {Phase.WARM_UP, Phase.CHECK_WARM_UP, Phase.SETTLED, Phase.ENDED},
    Phase.CHECK_WARM_UP: {Phase.WARM_UP, Phase.CHECK, Phase.ENDED},
    Phase.CHECK: {Phase.WARM_UP, Phase.SETTLED, Phase.EARLIER_WARM_UP, Phase.ENDED},
    Phase.EARLIER_WARM_UP: {Phase.WARM_UP, Phase.EARLIER, Phase.ENDED},
    Phase.EARLIER: {Phase.WARM_UP, Phase.SETTLED, Phase.ENDED},
    Phase.SETTLED: {Phase.WARM_UP, Phase.ENDED},
    Phase.ENDED: set[Phase](),
}


class Planning:
    """The :class:`.Study` that plans one optimizer's buckets; called after each of its steps.

    `news` travels with the calls of its steps.
    """

    def __init__(
        self, comm: Communicator, engine: Engine, strategy: PlannedStrategy, news: Replanning, *, follow: bool
    ) -> None:
        self.report: Report | None = None
        self.checked: float | None = None  # median seconds of a step with the plan that was made
        self._comm, self._engine, self._news, self._follow = comm, engine, news, follow
        self._phase = Phase.FIRST
        self._mine: weakref.ref[DistributedOptimizer] | None = None
        self._strategy = strategy  # the last one that was chosen here …
        self._earlier = strategy  # … and the one before
        self._buckets: list[weakref.ref[Bucket]] = []  # as they were when this phase began
        self._units: list[tuple[int, ...]] = []  # layers, as they were when they were measured
        self._clock: StepClock | None = None
        self._handle: RemovableHandle | None = None
        self._steps = 0  # of this phase
        self._stamps = engine.round.comm.stamps()
        self._marks: list[Stamp] = []  # when this phase began, and when its steps ended
        self._last = 0.0  # when the last step ended, by the host's clock
        self._seconds: deque[float] = deque(maxlen=_WATCHED)
        self._usual = 0.0
        self._checked_at = 0.0  # seconds of a step with the new plan, while it is checked
        self._again: float | None = None  # … with the earlier plan, when that was measured once more
        self._pause = _PAUSE

    def attach(self, optimizer: DistributedOptimizer) -> None:
        """Begin with the next step of `optimizer`, which has made none yet."""
        self._mine = weakref.ref(optimizer)
        optimizer._study(self)

    @property
    def under_way(self) -> bool:
        return self._phase not in (Phase.SETTLED, Phase.ENDED)

    def explained(self, optimizer: DistributedOptimizer) -> Explained:
        """The facts about the last plan and its measurements.

        On any rank. Raises ``RuntimeError`` before anything was.
        """
        report, engine = self.report, self._engine
        if report is None or report.times is None:
            why = report.problem if report is not None else "it is made from the first steps; make some more"
            raise RuntimeError(f"there is no plan to explain: {why}")
        if optimizer.strategy is not self._strategy:
            raise RuntimeError(NO_PLAN)
        times = report.times
        units = self._units
        work = work_of(engine, times, units)
        strategy = self._strategy
        plan, specs = optimizer.preview(strategy), engine.planner.specs

        def simulate(work: Workload, network: Fitted) -> Run:
            return simulated(strategy, plan, Job(work, network, specs, layers_of(units, behind=1)))

        shards = sum(
            bucket.nbytes * (max(bucket.shares) / sum(bucket.shares) if bucket.sharded else 1)
            for bucket in engine.order
        )
        return Explained(
            strategy=strategy.name,
            ranks=self._comm.size,
            setting=strategy.planned,
            buckets=len(plan),
            whole=0 if strategy.updates is Updates.DEFERRED else sum(not bucket.sharded for bucket in plan),
            work=work,
            model=work_of(engine, times, units, bare=True),
            network=Fitted(self._comm.size, *report.network),
            computed=report.computed,
            hooks=sum(times.gates) + sum(times.hooks),
            issuing=times.handling * len(plan),
            updates=times.update * shards,
            before=report.measured if self._again is None else self._again,
            again=self._again is not None,
            after=self.checked,
            simulate=simulate,
        )

    def explain(self, optimizer: DistributedOptimizer) -> str:
        """The same in words."""
        return explanation(self.explained(optimizer))

    def rows(self, optimizer: DistributedOptimizer) -> list[Row]:
        """Two simulated steps of the plan."""
        told = self.explained(optimizer)
        return rows(told.simulate(told.work, told.network))

    def __call__(self, optimizer: DistributedOptimizer, _args: Any, _kwargs: Any) -> None:
        """A step of `optimizer` ended. On every rank."""
        if self._mine is None or self._mine() is not optimizer or self._phase is Phase.ENDED:
            return
        now = time.perf_counter()
        took, self._last = now - self._last, now
        if optimizer.strategy is not self._strategy:  # replan() by the script, on all ranks alike
            self._end()
        elif self._phase is Phase.SETTLED:
            self._watch(optimizer, took)
        elif not self._engine.learning:
            self._advance(optimizer)

    # - Towards a plan

    def _advance(self, optimizer: DistributedOptimizer) -> None:
        self._steps += 1
        if self._phase not in (Phase.FIRST, Phase.WARM_UP) and self._others:
            self._stop_measuring()
            self._turn(Phase.WARM_UP)
        elif self._phase is Phase.FIRST:
            self._turn(Phase.WARM_UP)
        elif self._phase is Phase.WARM_UP:
            self._begin(optimizer)
        elif self._phase is Phase.CHECK_WARM_UP:
            self._turn(Phase.CHECK)
        elif self._phase is Phase.EARLIER_WARM_UP:
            self._turn(Phase.EARLIER)
        else:
            self._marks.append(self._stamps.now())
            if self._clock is not None:
                self._clock.stepped()
            if self._steps == _MEASURED:
                act = {Phase.MEASURE: self._decide, Phase.CHECK: self._check, Phase.EARLIER: self._compare}
                act[self._phase](optimizer)

    def _turn(self, to: Phase) -> None:
        if to not in _NEXT[self._phase]:
            raise RuntimeError(f"planning that is in {self._phase.name} cannot come to {to.name}")
        self._phase, self._steps = to, 0
        self._marks = [self._stamps.now()]
        self._seconds.clear()
        self._buckets = [weakref.ref(bucket) for bucket in self._engine.order]

    @property
    def _measured(self) -> float:
        """The median of what the steps of this phase took, in seconds, on this rank."""
        ends = map(self._stamps.reader(), self._marks)
        return statistics.median(until - since for since, until in pairwise(ends))

    @property
    def _others(self) -> bool:
        """Whether there are other buckets than when this phase began. The same on every rank."""
        return [bucket() for bucket in self._buckets] != self._engine.order

    def _begin(self, optimizer: DistributedOptimizer) -> None:
        """Measure from here, where a step has just ended."""
        self._turn(Phase.MEASURE)
        late = "reduce" if self._strategy.updates is Updates.DEFERRED else "gather"
        self._clock = StepClock({id(slot.param): slot.index for slot in self._engine.slots}, late, self._stamps)
        self._engine.measure(self._clock)
        clock = self._clock
        self._handle = optimizer.register_step_pre_hook(lambda *_: clock.stepping())

    def _stop_measuring(self) -> StepClock | None:
        clock, self._clock = self._clock, None
        if clock is not None:
            self._engine.measure(None)
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        return clock

    def _end(self) -> None:
        self._stop_measuring()
        self._news.forget()
        self._turn(Phase.ENDED)

    def _decide(self, optimizer: DistributedOptimizer) -> None:
        clock = self._stop_measuring()
        assert clock is not None, "this phase measures"
        measured = self._measured
        report = decided(self._comm, self._engine, self._strategy, clock, measured)
        self.report, self.checked, self._again, self._units = report, None, None, self._engine.planner.units
        if report.problem:
            if self._comm.rank == 0:
                level = logging.INFO if report.times is None else logging.WARNING
                log.log(level, "buckets stay as they are: %s", report.problem)
            self._end()
        elif report.setting == report.before:
            self._settle(optimizer, measured)
        else:
            if self._comm.rank == 0:
                log.info("%s", in_a_line(optimizer.strategy.name, report))
            self._earlier = self._strategy
            self._replan(optimizer, self._strategy.at(report.setting))
            self._turn(Phase.CHECK_WARM_UP)

    def _replan(self, optimizer: DistributedOptimizer, strategy: PlannedStrategy) -> None:
        optimizer._replan(strategy)
        self._strategy = strategy
        self._last = time.perf_counter()

    def _check(self, optimizer: DistributedOptimizer) -> None:
        assert self.report is not None, "a plan is checked"
        before = self.report.measured
        self._checked_at = seconds = agree(self._comm, self._measured)
        if seconds <= _WORSE * before:
            self._keep(optimizer, seconds, before)
            return
        self._exchange(optimizer)
        self._turn(Phase.EARLIER_WARM_UP)

    def _compare(self, optimizer: DistributedOptimizer) -> None:
        self._again = again = agree(self._comm, self._measured)
        if self._checked_at <= _WORSE * again:
            self._exchange(optimizer)
            self._keep(optimizer, self._checked_at, again)
            return
        if self._comm.rank == 0:
            log.info(
                "%s: a step takes %.4g ms with the new plan and %.4g with the earlier one, which stays",
                optimizer.strategy.name,
                1e3 * self._checked_at,
                1e3 * again,
            )
        self._settle(optimizer, again)

    def _exchange(self, optimizer: DistributedOptimizer) -> None:
        """The other one of the new and the earlier plan."""
        here = self._strategy
        self._replan(optimizer, self._earlier)
        self._earlier = here

    def _keep(self, optimizer: DistributedOptimizer, seconds: float, before: float) -> None:
        self.checked, self._pause = seconds, _PAUSE
        if self._comm.rank == 0:
            log.info(
                "%s: a step takes %.4g ms, and took %.4g before; the new plan stays",
                optimizer.strategy.name,
                1e3 * seconds,
                1e3 * before,
            )
        self._settle(optimizer, seconds)

    # - Afterwards

    def _settle(self, optimizer: DistributedOptimizer, seconds: float) -> None:
        self._usual = seconds
        self._turn(Phase.SETTLED)
        if self._comm.rank == 0 and log.isEnabledFor(logging.INFO):  # it simulates
            log.info("%s", self.explain(optimizer))

    def _watch(self, optimizer: DistributedOptimizer, took: float) -> None:
        """Rank 0 looks at what steps take; all hear of it, and measure anew, in the same step."""
        if not self._follow:
            return
        if self._news.heard:
            self._news.forget()
            if agree(self._comm, self._changed):
                if self._comm.rank == 0:
                    log.info(
                        "a step takes %.4g ms, and took %.4g when buckets were planned: measuring again",
                        1e3 * statistics.median(self._seconds),
                        1e3 * self._usual,
                    )
                self._pause = min(2 * self._pause, _LONGEST_PAUSE)
                self._turn(Phase.WARM_UP)
            return
        self._steps += 1
        self._seconds.append(took)
        if self._steps >= self._pause and self._comm.rank == 0 and self._changed:
            self._news.wanted = True

    @property
    def _changed(self) -> bool:
        if len(self._seconds) < _WATCHED:
            return False
        ratio = statistics.median(self._seconds) / self._usual
        return not 1 / _CHANGED < ratio < _CHANGED


def plan_by_itself(optimizer: DistributedOptimizer, process_set: ProcessSet, *, follow: bool = True) -> Planning | None:
    """Let `optimizer`'s strategy choose, by what its first steps show, what it may (`PlannedStrategy.planned`).

    On every rank of the job, before the first step. With `follow`, it looks again when steps become longer or shorter.
    None where there is nothing to plan: a rank alone.
    """
    comm = beside(current(), process_set)
    engine, strategy, news = optimizer._engine, optimizer.strategy, optimizer._replanning
    if news is None or not isinstance(strategy, PlannedStrategy):
        return None
    start_cost(link_of(comm, engine))  # now, while nothing else is in flight
    planning = Planning(comm, engine, strategy, news, follow=follow)
    planning.attach(optimizer)
    optimizer._planned = planning
    return planning
