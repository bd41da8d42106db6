"""A decision about buckets: each rank measures something else, and what all of them do follows from all of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

import dear
from overlap.optimizer import decision
from overlap.plan.choice import Choice
from overlap.plan.measurement import Lap, Sent, Times, thread_costs
from overlap.plan.simulation.network import Fitted
from tests.spmd.planned_training import MIB, STEPS, planned_job, scripted, train_steps
from tests.spmd_plugin import SIZE

pytestmark = pytest.mark.skipif(SIZE == 1, reason="a rank alone has nothing to plan")


def test_the_rank_that_computes_longest_is_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(_laps: Sequence[Lap], _layer_of: Mapping[int, int], layers: int) -> Times:
        each, none = (1.0 + dear.rank(),) * layers, (0.0,) * layers
        return Times(each, each, none, none, 0.0, 0.0, 0.0, 0.0, 0.0)

    monkeypatch.setattr(decision, "layer_times", measured)
    jobs = scripted(monkeypatch)
    train_steps(*planned_job(), STEPS)
    for job in jobs:
        assert {layer.forward for layer in job.work.layers[1:-1]} == {float(SIZE)}
    assert len(jobs) == (dear.rank() == 0)


def test_what_an_operation_takes_is_the_least_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is late makes the others wait."""
    found: list[tuple[int, set[float]]] = []

    def services(sent: Sequence[Sent], _start: float) -> list[tuple[float, bool]]:
        return [(1.0 + SIZE - dear.rank(), True) for _ in sent]

    def fitted(workers: int, _sent: Any, seconds: Sequence[float], _queued: Any, start: float) -> Fitted:
        found.append((workers, set(seconds)))
        return Fitted(workers, start, 1e-9, 1e-9)

    monkeypatch.setattr(decision, "services", services)
    monkeypatch.setattr(decision, "fitted", fitted)
    train_steps(*planned_job(), STEPS)
    assert found == ([(SIZE, {2.0})] if dear.rank() == 0 else [])


def test_the_rank_with_the_least_memory_decides_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan takes as much as the model, and AdamW's state of what is not sharded, which is twice as large."""
    model, optimizer = planned_job()
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    scarce = 2.5 * nbytes / decision._ROOM * dear.local_size()  # the plan may have a share of it
    found: list[bool] = []

    def choose(current: Any, preview: Any, _job: Any, fits: Any, _enough: Any) -> Choice:
        found.extend(fits(preview(current.at({**current.planned, "all_reduced": share}))) for share in (0.0, 1.0))
        return Choice(dict(current.planned), 1.0, 1.0, 1)

    monkeypatch.setattr(decision, "choose", choose)
    monkeypatch.setattr(decision, "available_bytes", lambda _: scarce if dear.rank() == SIZE - 1 else 1000 * scarce)
    train_steps(model, optimizer, STEPS)
    assert found == ([True, False] if dear.rank() == 0 else [])


def test_what_a_rank_updates_is_its_own_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Owners of whole parameters have unequal ones."""
    found: list[Mapping[int, int]] = []

    def costs(sent: Sequence[Sent], laps: Sequence[Lap], share: Mapping[int, int], handling: float, **how: Any) -> Any:
        found.append(share)
        return thread_costs(sent, laps, share, handling, **how)

    monkeypatch.setattr(decision, "thread_costs", costs)
    scripted(monkeypatch)
    model = torch.nn.Sequential(torch.nn.Linear(16, 40), torch.nn.Linear(40, 8))
    optimizer: Any = dear.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, strategy="oss")
    train_steps(model, optimizer, STEPS)
    shares = dear.allgather_object(found[0])
    for bucket in optimizer.buckets:
        assert sum(share[bucket.index] for share in shares) == bucket.nbytes
        assert len({share[bucket.index] for share in shares}) > 1


@pytest.mark.parametrize(("seconds", "all_reduced"), [(0.985, 0.0), (0.975, 0.5)])
def test_a_plan_that_gains_next_to_nothing_is_not_taken(
    seconds: float, all_reduced: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, {"threshold_mb": 300 / MIB, "all_reduced": 0.5}, seconds=seconds)
    model, optimizer = planned_job()
    train_steps(model, optimizer, STEPS)
    assert optimizer.strategy.all_reduced == all_reduced
    assert optimizer.tuning is (all_reduced > 0)  # a new plan is checked
