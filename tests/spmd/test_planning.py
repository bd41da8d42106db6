"""The plan by itself: made from the first steps, the same on every rank, and never at the price of a result."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import bytescheduler_adapter
import dear
import oss
from overlap.core import bucket
from overlap.core.clock import StepClock
from overlap.job.process_set import global_process_set
from overlap.optimizer import decision, planning
from overlap.optimizer.planning import plan_by_itself
from overlap.plan.measurement import Sent, services
from overlap.state.shard_state import ShardState
from overlap.transport.memory import copy_gradient
from overlap.transport.stamps import Stamps
from tests.spmd.listening import heard
from tests.spmd.planned_training import MIB, STEPS, Clock, planned_job, scripted, train_steps
from tests.spmd.training import check_while_it_trains
from tests.spmd_plugin import SIZE

alone = pytest.mark.skipif(SIZE == 1, reason="a rank alone has nothing to plan")


def _passes(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps, and what happens inside of them, are measured by it."""
    monkeypatch.setattr(planning, "time", clock)
    monkeypatch.setattr(Stamps, "now", lambda _: clock.perf_counter())


@alone
@pytest.mark.parametrize("kind", ["sgd", "adamw", "adafactor"])
def test_results_are_those_of_one_process_while_buckets_change(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"threshold_mb": 300 / MIB, "all_reduced": 0.5}
    scripted(monkeypatch, small)

    def look(step: int, optimizer: Any) -> None:
        if step == STEPS:
            assert {name: getattr(optimizer.strategy, name) for name in small} == small
            assert len(optimizer.buckets) > 2
            held = [bucket.sharded for bucket in optimizer.buckets]
            assert any(held) is (kind != "adafactor")
            assert not all(held)

    check_while_it_trains(kind, dear.DistributedOptimizer, 12, look)


@alone
@pytest.mark.parametrize("kind", ["sgd", "adafactor"])
def test_results_of_owners_are_the_same_while_buckets_change(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, {"threshold_mb": 300 / MIB})

    def look(step: int, optimizer: Any) -> None:
        if step == STEPS:
            assert optimizer.strategy.threshold_mb == 300 / MIB
            assert len(optimizer.buckets) > 2

    check_while_it_trains(kind, oss.DistributedOptimizer, 12, look)


@alone
@pytest.mark.parametrize("kind", ["sgd", "adafactor"])
def test_results_are_the_same_while_partitions_change(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"partition_mb": 300 / MIB, "credit_mb": 500 / MIB}
    scripted(monkeypatch, small)

    def look(step: int, optimizer: Any) -> None:
        if step == STEPS:
            assert optimizer.strategy.setting == small

    check_while_it_trains(kind, bytescheduler_adapter.DistributedOptimizer, 12, look)


@alone
@pytest.mark.parametrize("given", ["partition_mb", "credit_mb"])
def test_what_is_given_of_partitions_and_credit_stays(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    other = "credit_mb" if given == "partition_mb" else "partition_mb"
    scripted(monkeypatch, {other: 1000 / MIB})
    model, optimizer = planned_job(strategy="bytescheduler_adapter", **{given: 600 / MIB})
    train_steps(model, optimizer, STEPS)
    assert optimizer.strategy.setting == {given: 600 / MIB, other: 1000 / MIB}
    both = {"partition_mb": 600 / MIB, "credit_mb": 900 / MIB}
    model, optimizer = planned_job(strategy="bytescheduler_adapter", **both)
    assert not optimizer.tuning
    train_steps(model, optimizer, STEPS)
    assert optimizer.strategy.setting == both


@alone
def test_partitions_are_measured_one_by_one_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Sent] = []

    def noted(sent: list[Sent], start: float) -> list[tuple[float, bool]]:
        found.extend(sent)
        return services(sent, start)

    monkeypatch.setattr(decision, "services", noted)
    model, optimizer = planned_job(strategy="bytescheduler_adapter", partition_mb=300 / MIB)
    train_steps(model, optimizer, STEPS)
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    assert sum(one.nbytes for one in found) >= 2 * nbytes  # of three laps, the last one's are on their way still
    assert max(one.nbytes for one in found) <= 320
    assert all(one.ended > one.issued for one in found)
    orders = dear.allgather_object([(one.bucket, one.nbytes) for one in found])
    assert all(order == orders[0] for order in orders)


@alone
@pytest.mark.parametrize("strategy", ["dear", "oss", "bytescheduler_adapter"])
def test_the_plan_is_made_from_what_was_measured_and_explained(strategy: str, tmp_path: Path) -> None:
    model, optimizer = planned_job(strategy=strategy)
    with pytest.raises(RuntimeError, match="made from the first steps"):
        optimizer.explain()
    with heard(logging.INFO) as said:
        train_steps(model, optimizer, 14)
    assert not optimizer.tuning
    text = optimizer.explain()
    for line in (
        "network",
        "computation",
        "bound",
        "plan ",
        "step ",
        "overhead",
        "update",
        "not hidden",
        "would help",
        "wfbp",
    ):
        assert line in text
    assert strategy == "dear" or "updated in full" not in text
    reports = dear.allgather_object(text)
    assert all(one == reports[0] for one in reports)
    assert [line for line in said if "simulated" in line and "_mb=" in line] or dear.rank() > 0
    if dear.rank() == 0:
        optimizer.draw_plan(tmp_path / "plan.png")
        assert (tmp_path / "plan.png").stat().st_size > 5000


@alone
def test_layers_are_measured_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            time.sleep(0.02)
            return super().forward(x)

    jobs = scripted(monkeypatch)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), Slow(16, 16), torch.nn.Linear(16, 16))
    optimizer = dear.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model)
    for _ in range(STEPS + 1):
        time.sleep(0.05)
        train_steps(model, optimizer, 1)
    if dear.rank() == 0:
        (job,) = jobs
        names = [layer.name for layer in job.work.layers]
        assert names == ["before forward", "0.weight", "1.weight", "2.weight", "between forward and backward"]
        seconds = [layer.forward for layer in job.work.layers]
        assert seconds[2] > 0.02
        assert seconds[0] > 0.05
        assert seconds[1] < 0.02
        assert job.network.all_reduce(2**20).seconds > 0
        assert [
            names[job.layer_of[slot.index]] for slot in optimizer._engine.slots if slot.name.endswith("weight")
        ] == names[1:4]


@alone
@pytest.mark.parametrize("strategy", ["dear", "oss"])
def test_what_hooks_take_is_no_computation(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of gradients, slowed down, are overhead; and each module's gates were seen."""
    clocks: list[StepClock] = []

    def noted(*arguments: Any) -> StepClock:
        clocks.append(StepClock(*arguments))
        return clocks[-1]

    def slow(place: torch.Tensor, gradient: torch.Tensor) -> None:
        time.sleep(0.002)
        copy_gradient(place, gradient)

    scripted(monkeypatch)
    monkeypatch.setattr(planning, "StepClock", noted)
    monkeypatch.setattr(bucket, "copy_gradient", slow)
    model, optimizer = planned_job(strategy=strategy)
    train_steps(model, optimizer, STEPS + 1)
    told = optimizer._planned.explained(optimizer)
    copies = 0.002 * 24
    assert told.hooks > copies
    ours = sum(layer.backward for layer in told.work.layers) - sum(layer.backward for layer in told.model.layers)
    assert ours > copies
    (clock,) = clocks
    assert all(len(lap.gates) >= 3 * 12 for lap in clock.read()[0])  # before, inside and after each layer


@alone
@pytest.mark.parametrize("strategy", ["dear", "oss", "bytescheduler_adapter"])
@pytest.mark.parametrize("change", ["converted", "thawed"])
@pytest.mark.parametrize("at", [2, 4])
def test_buckets_that_change_while_they_are_measured_begin_it_anew(strategy: str, change: str, at: int) -> None:
    torch.manual_seed(3)
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4))).double()
    model[1].requires_grad_(change != "thawed")
    optimizer = dear.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, strategy=strategy)
    with heard(logging.WARNING) as said:
        for step in range(at + STEPS):
            assert optimizer._planned.report is None  # four steps after the change there is one
            if step == at and change == "converted":
                model.float()
            model[1].requires_grad_(change != "thawed" or step >= at)
            optimizer.zero_grad()
            model(torch.full((4, 16), 1.0 + dear.rank(), dtype=model[0].weight.dtype)).square().mean().backward()
            optimizer.step()
    assert not [line for line in said if "buckets" in line]
    assert optimizer.explain()


@alone
def test_a_plan_that_turns_out_slower_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, {"threshold_mb": 300 / MIB, "all_reduced": 0.0})
    clock = Clock()
    _passes(clock, monkeypatch)
    model, optimizer = planned_job()
    first = optimizer.strategy.threshold_mb
    train_steps(model, optimizer, STEPS, clock, 1.0)
    assert optimizer.strategy.threshold_mb == 300 / MIB
    assert optimizer.tuning
    train_steps(model, optimizer, 4, clock, 1.05)
    assert optimizer.strategy.threshold_mb == first
    assert optimizer.tuning
    train_steps(model, optimizer, 4, clock, 1.0)
    assert optimizer.strategy.threshold_mb == first
    assert not optimizer.tuning


@alone
def test_a_plan_stays_where_everything_has_become_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, {"threshold_mb": 300 / MIB, "all_reduced": 0.0})
    clock = Clock()
    _passes(clock, monkeypatch)
    model, optimizer = planned_job()
    first = optimizer.strategy.threshold_mb
    train_steps(model, optimizer, STEPS, clock, 1.0)
    train_steps(model, optimizer, 4, clock, 1.2)
    assert optimizer.strategy.threshold_mb == first
    train_steps(model, optimizer, 4, clock, 1.25)
    assert optimizer.strategy.threshold_mb == 300 / MIB
    assert not optimizer.tuning
    assert "1,200 ms measured" in optimizer.explain()


@alone
def test_steps_that_become_longer_are_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = scripted(monkeypatch, {}, {"threshold_mb": 300 / MIB, "all_reduced": 0.25}, {})
    clock = Clock()
    _passes(clock, monkeypatch)
    model, optimizer = planned_job()
    train_steps(model, optimizer, STEPS, clock, 1.0)
    assert not optimizer.tuning
    with heard(logging.INFO) as said:
        train_steps(model, optimizer, 30, clock, 1.1)
        assert optimizer.strategy.all_reduced == 0
        train_steps(
            model, optimizer, 14, clock, 4.0
        )  # the median of nine steps, one step, one that warms up, three measured
    assert optimizer.strategy.all_reduced == 0.25
    train_steps(model, optimizer, 30, clock, 3.5)
    assert not optimizer.tuning
    assert len(jobs) == (2 if dear.rank() == 0 else 0)
    assert any("measuring again" in line for line in said) or dear.rank() > 0


@alone
def test_a_script_that_replans_has_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = scripted(monkeypatch, {"threshold_mb": 25.0, "all_reduced": 0.5})
    model, optimizer = planned_job()
    train_steps(model, optimizer, 2)
    optimizer.replan(optimizer.strategy.at({"threshold_mb": 400 / MIB}))
    train_steps(model, optimizer, STEPS)
    assert optimizer.strategy.threshold_mb == 400 / MIB
    assert not optimizer.tuning
    assert not jobs
    with pytest.raises(RuntimeError, match="no plan to explain"):
        optimizer.explain()


@alone
@pytest.mark.parametrize(
    "options", [{"threshold_mb": 25}, {"eager": True}, {"policy": "rb"}, {"num_nearby_layers": 2}], ids=str
)
def test_who_chooses_buckets_gets_them(options: dict[str, Any]) -> None:
    model, optimizer = planned_job(**options)
    before = optimizer.strategy.threshold_mb
    train_steps(model, optimizer, STEPS + 2)
    assert optimizer.strategy.threshold_mb == before
    assert not optimizer.tuning
    with pytest.raises(RuntimeError, match="has chosen the buckets"):
        optimizer.explain()


@alone
def test_a_search_begins_with_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, {"threshold_mb": 300 / MIB, "all_reduced": 0.5})
    tuning = dear.Tuning(trials=2, warmup=0, window=1, pairs=1, bounds={"threshold_mb": (200 / MIB, 3000 / MIB)})
    model, optimizer = planned_job(tune=tuning)
    seen = []
    for _ in range(20):
        train_steps(model, optimizer, 1)
        seen.append(optimizer.strategy.threshold_mb)
    assert not optimizer.tuning
    assert seen[STEPS] == 300 / MIB
    assert len(set(seen)) > 2
    assert optimizer.strategy.all_reduced in (0.0, 0.5)


def test_a_rank_alone_and_what_cannot_be_measured() -> None:
    model, optimizer = planned_job()
    if SIZE == 1:
        assert plan_by_itself(optimizer, global_process_set) is None
        assert not optimizer.tuning
    if SIZE > 1:  # no forward of any module: gradients come by hand
        for _ in range(STEPS + 1):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        assert not optimizer.tuning
        with pytest.raises(RuntimeError, match="no rank has seen a forward"):
            optimizer.explain()


def test_memory_of_the_buckets_before_is_gone_when_state_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a new plan would need gradients, or parameters, twice for a moment."""
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(6)))
    wrapped = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    optimizer: Any = dear.DistributedOptimizer(wrapped, model, threshold_mb=0.004)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.full((4, 32), 1.0 + dear.rank())).square().mean().backward()
        optimizer.step()
    optimizer.zero_grad()
    buckets = list(optimizer._engine.order)
    kept = [
        StorageWeakRef(one.untyped_storage())
        for each in buckets
        for one in (each.gradients.whole, each.parameters.whole)
    ]
    del buckets
    seen: list[bool] = []
    move = ShardState.moved

    def moved(self: ShardState, *others: Any) -> None:
        seen.extend(each.expired() for each in kept)
        move(self, *others)

    monkeypatch.setattr(ShardState, "moved", moved)
    optimizer.replan(optimizer.strategy.at({"threshold_mb": 0.012}))
    assert len(seen) >= 8
    assert all(seen)
