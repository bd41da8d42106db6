"""What a planner does from step to step, on one rank, with times that are given: no communicator, no training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dear.optimizer import Dear
from overlap.features.replanning import Replanning
from overlap.optimizer import planning
from overlap.optimizer.decision import Report
from overlap.optimizer.planning import Planning
from overlap.plan.measurement import Times
from overlap.plan.simulation.workload import Workload
from overlap.transport.stamps import Stamps

FIRST = Dear(25.0, None, "", "rsag", False, None, 0.0, frozenset({"threshold_mb"}))
SAME: dict[str, float] = {}
OTHER = {"threshold_mb": 1.0}
TIMES = Times((1.0,), (2.0,), (0.125,), (0.25, 0.5), before=0.0, between=0.0, after=0.0, update=2.0, handling=3.0)
REPORT = Report({}, {}, 1.0, 1.0, 0.5, TIMES, [3.0], (0.0, 0.0, 0.0), 7)
MOST = 13  # steps until a plan is settled, where it is compared with the one before


class Scripted(Stamps):
    """Of a clock that is given."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now


class Engine:
    """What a planner asks of one."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.learning, self.clock = False, None
        self.slots: list[Any] = []
        self.order: list[Any] = []
        self.planner = SimpleNamespace(units=[], specs=[])
        self.round = SimpleNamespace(comm=SimpleNamespace(stamps=lambda: Scripted(now)))

    def measure(self, clock: Any) -> None:
        self.clock = clock


class Optimizer(torch.optim.SGD):
    """What a planner asks of one; its hooks are torch's."""

    def __init__(self) -> None:
        super().__init__([torch.nn.Parameter(torch.ones(1))], 0.1)
        self.strategy = FIRST

    def _study(self, study: Any) -> None:
        pass

    def _replan(self, strategy: Dear) -> None:
        self.strategy = strategy

    def preview(self, strategy: Dear) -> Any:
        return (SimpleNamespace(sharded=True), SimpleNamespace(sharded=False))


class Job:
    """A planner that decides for `settings`, one after the other, and steps that take as long as they are said to."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, settings: Sequence[dict[str, float]], follow: bool = True
    ) -> None:
        self.engine, self.optimizer, self.news = Engine(lambda: self._now), Optimizer(), Replanning()
        self.decided = self.told = 0  # plans, and steps in which rank 0 has said something to all
        self._now, self._settings = 0.0, settings
        monkeypatch.setattr(planning, "agree", lambda _comm, value: value)
        monkeypatch.setattr(planning, "decided", self._decided)
        monkeypatch.setattr(planning, "time", SimpleNamespace(perf_counter=lambda: self._now))
        comm: Any = SimpleNamespace(rank=0, size=2)
        engine: Any = self.engine
        optimizer: Any = self.optimizer
        self.planning = Planning(comm, engine, FIRST, self.news, follow=follow)
        self.planning.attach(optimizer)

    def _decided(self, _comm: Any, _engine: Any, strategy: Dear, _clock: Any, measured: float) -> Report:
        before = strategy.planned
        setting = {**before, **self._settings[self.decided]}
        self.decided += 1
        return replace(REPORT, setting=setting, before=before, measured=measured)

    def steps(self, number: int, seconds: float, optimizer: Any = None) -> None:
        for _ in range(number):
            said = self.news.news()
            self.told += said
            self.news.closed(said, lambda: 0, lambda: 1.0)
            self._now += seconds
            self.planning(self.optimizer if optimizer is None else optimizer, (), {})

    def settle(self, seconds: float, slower: float = 1.0) -> None:
        """Steps until a plan is made, and checked; with other buckets than the first ones they are so much `slower`."""
        for _ in range(MOST):
            if self.planning.under_way:
                self.steps(1, seconds * (1.0 if self.optimizer.strategy is FIRST else slower))
        assert not self.planning.under_way


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Callable[..., Job]:
    caplog.set_level(logging.WARNING, logger="dear")  # what it says besides would be simulated for it
    return lambda *settings, follow=True: Job(monkeypatch, settings, follow)


@pytest.mark.parametrize(
    ("settings", "slower", "pauses"),
    [
        ([SAME] * 9, 1.0, [10, 20, 40, 80, 160, 320, 640, 640]),
        ([SAME, SAME, SAME, OTHER, SAME, SAME], 1.0, [10, 20, 40, 10, 20]),
        ([SAME, SAME, OTHER, OTHER, SAME], 1.5, [10, 20, 40, 80]),  # taken back: nothing has changed
    ],
    ids=["nothing changes", "the third look changes the plan", "a plan is taken back"],
)
def test_looks_come_less_often_until_one_changes_the_plan(
    settings: list[dict[str, float]], slower: float, pauses: list[int], job: Callable[..., Job]
) -> None:
    """Steps always take twice as long as at the last look, so it is the pause that delays the next one."""
    one, found = job(*settings), []
    for power in range(len(pauses)):
        one.settle(2.0**power, slower)
        steps = 0
        while not one.planning.under_way:
            one.steps(1, 2.0 ** (power + 1))
            steps += 1
            assert steps <= 1 + planning._LONGEST_PAUSE, "no look comes"
        found.append(steps - 1)  # in the last one all ranks heard of it
    assert found == pauses


@pytest.mark.parametrize(("ratio", "looks"), [(0.5, 2), (0.79, 2), (0.81, 1), (1.2, 1), (1.3, 2)])
def test_steps_that_become_longer_or_shorter_are_measured_again(
    ratio: float, looks: int, job: Callable[..., Job]
) -> None:
    one = job(SAME, SAME)
    one.settle(1.0)
    one.steps(30, ratio)
    assert one.decided == looks


def test_what_is_usual_is_what_steps_take_with_the_new_plan(job: Callable[..., Job]) -> None:
    one = job(OTHER, SAME, SAME)
    one.steps(5, 1.0)
    assert one.optimizer.strategy.threshold_mb == 1.0
    one.settle(0.5)
    assert one.planning.checked == 0.5
    one.steps(40, 0.5)
    assert one.decided == 1
    one.steps(40, 1.0)  # as long as before the plan, which stays
    assert one.decided == 2
    assert one.planning.checked is None
    assert one.planning.report is not None
    assert one.planning.report.measured == 1.0


def test_a_plan_that_a_search_follows_is_not_looked_at_again(job: Callable[..., Job]) -> None:
    one = job(SAME, SAME, follow=False)
    one.settle(1.0)
    one.steps(40, 4.0)
    assert (one.decided, one.told) == (1, 0)


def test_steps_of_another_optimizer_do_not_count(job: Callable[..., Job]) -> None:
    one, other = job(OTHER), Optimizer()
    one.steps(20, 1.0, other)
    assert (one.decided, one.planning.under_way) == (0, True)
    assert other.strategy is FIRST


@pytest.mark.parametrize("steps", [2, 4, 5, 7, 9], ids=lambda steps: f"after {steps} steps")
def test_a_script_that_replans_ends_the_planning(steps: int, job: Callable[..., Job]) -> None:
    one = job(OTHER)
    one.steps(steps, 1.0)
    mine = one.optimizer.strategy = FIRST.at({"threshold_mb": 3.0})
    one.steps(20, 1.0)
    assert not one.planning.under_way
    assert one.optimizer.strategy is mine
    assert one.engine.clock is None
    assert not one.optimizer._optimizer_step_pre_hooks


def test_what_has_measured_is_taken_away(job: Callable[..., Job]) -> None:
    one = job(SAME)
    one.steps(4, 1.0)
    assert one.engine.clock is not None
    assert one.optimizer._optimizer_step_pre_hooks
    one.steps(1, 1.0)
    assert one.engine.clock is None
    assert not one.optimizer._optimizer_step_pre_hooks


def test_a_script_that_replans_after_rank_0_has_said_something_is_told_no_more(job: Callable[..., Job]) -> None:
    """Else all ranks would gather objects in every step from then on, as they do where anybody has news."""
    one = job(SAME)
    one.settle(1.0)
    one.steps(planning._PAUSE, 2.0)
    assert one.news.wanted
    one.optimizer.strategy = FIRST.at({"threshold_mb": 3.0})
    one.steps(10, 2.0)
    assert one.told == 1
    assert one.decided == 1


def test_what_is_ours_is_gates_and_hooks_operations_and_updates(
    monkeypatch: pytest.MonkeyPatch, job: Callable[..., Job]
) -> None:
    monkeypatch.setattr(planning, "work_of", lambda *_, **__: Workload(()))
    one = job(SAME)
    one.settle(1.0)
    one.engine.order = [
        SimpleNamespace(nbytes=100, shares=(30, 70), sharded=True),
        SimpleNamespace(nbytes=10, shares=(5, 5), sharded=False),  # every rank updates all of it
    ]
    optimizer: Any = one.optimizer
    told = one.planning.explained(optimizer)
    assert told.hooks == pytest.approx(0.125 + 0.75)
    assert told.issuing == pytest.approx(2 * 3.0)
    assert told.updates == pytest.approx(2.0 * (70 + 10))


@pytest.mark.parametrize(("later", "before", "after"), [(1.3, 1.3, 1.2), (1.0, 1.0, None)])
def test_the_newest_measurement_of_the_earlier_plan_is_explained(
    later: float, before: float, after: float | None, monkeypatch: pytest.MonkeyPatch, job: Callable[..., Job]
) -> None:
    """A plan turns out slower, and then so does the earlier one: or only the plan does, and is taken back."""
    monkeypatch.setattr(planning, "work_of", lambda *_, **__: Workload(()))
    one = job(OTHER)
    optimizer: Any = one.optimizer
    one.steps(5, 1.05)
    assert not one.planning.explained(optimizer).again
    one.steps(4, 1.2)
    one.steps(4, later)
    told = one.planning.explained(optimizer)
    assert (told.before, told.again, told.after) == (pytest.approx(before), True, after and pytest.approx(after))
