"""Tuning while training: results stay those of one process, rank 0 decides for all, and the search comes to its end."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import dear
import mgwfbp
import oss
from overlap.job.session import current
from overlap.optimizer import tuning as trial
from overlap.plan.tuning import bayes
from overlap.plan.tuning.options import Tuning
from tests.spmd.listening import heard
from tests.spmd.loops import LOOPS, Run
from tests.spmd.models import double_model
from tests.spmd.planned_training import Clock
from tests.spmd.strategies import OPTIMIZERS
from tests.spmd.training import assert_close, check_while_it_trains

EVERY_STEP = {"warmup": 0, "window": 1, "pairs": 2}
MB = 2**-20
OTHERS = (16, 2000, 7000)  # bytes: each leads to other buckets of the model than the start and the others do
TUNED: dict[str, Any] = {
    "dear": lambda o, m: dear.DistributedOptimizer(o, m, threshold_mb=25, tune=Tuning(trials=4, **EVERY_STEP)),
    "dear-eager": lambda o, m: dear.DistributedOptimizer(o, m, eager=True, tune=Tuning(trials=4, **EVERY_STEP)),
    "oss": lambda o, m: oss.DistributedOptimizer(o, m, threshold_mb=25, tune=Tuning(trials=4, **EVERY_STEP)),
    "mgwfbp": lambda o, m: mgwfbp.DistributedOptimizer(
        o, m, alpha_beta=(0.0, 0.0), merge_below_kb=25000, profile_steps=1, tune=Tuning(trials=4, **EVERY_STEP)
    ),
}


class Scripted:
    """Proposes one of OTHERS after the other."""

    def __init__(self, dimensions: Any, *, seed: int) -> None:
        (one,) = dimensions
        self._proposals = iter(
            [{one.name: nbytes / (2**20 if one.name.endswith("mb") else 2**10)} for nbytes in OTHERS]
        )

    def ask(self) -> dict[str, float]:
        return next(self._proposals)

    def tell(self, setting: Any, seconds: float) -> None:
        assert seconds > 0


def _plan(optimizer: Any) -> list[list[str]]:
    return [[slot.name for slot in bucket.slots] for bucket in optimizer.buckets]


@pytest.mark.parametrize("strategy", TUNED)
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_parity_while_every_step_has_other_buckets(strategy: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bayes, "BayesianSearch", Scripted)
    plans, searching = [], []

    def look(_step: int, optimizer: Any) -> None:
        plans.append(_plan(optimizer))
        searching.append(optimizer.tuning)

    check_while_it_trains(kind, TUNED[strategy], 12, look)
    first = 1 + (strategy == "mgwfbp") * 2  # the buckets of the first step, and those after the backward was timed
    assert len({str(plan) for plan in plans[first - 1 : first + 3]}) == 4
    assert plans[-1] == plans[-2]
    over = searching.index(False)
    assert over > first + 2
    assert not any(searching[over:])
    assert all(plan == plans[-1] for plan in plans[over:])
    assert all(other == plans for other in dear.allgather_object(plans))


@pytest.mark.parametrize("strategy", ["dear", "mgwfbp"])
@pytest.mark.parametrize(
    "loop", ["accumulated", "clipped_after_synchronize", "unfrozen_later", "group_added", "scaled"]
)
def test_loops_while_the_buckets_change(strategy: str, loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bayes, "BayesianSearch", Scripted)

    def train(distributed: bool) -> Any:
        model = double_model("Mlp")
        optimizer: Any = OPTIMIZERS["sgd"](list(model.parameters()))
        if distributed:
            optimizer = TUNED[strategy](optimizer, model)
        LOOPS[loop](Run(model, optimizer, dear.rank() if distributed else None, dear.size()))
        if distributed:
            optimizer.synchronize()
        return model.state_dict(), optimizer.state_dict()

    actual, expected = train(True), train(False)
    assert_close(actual[0], expected[0], "model")
    assert_close(actual[1], expected[1], "optimizer")


def _tuned(clock: Clock, best_kb: float, steps: int, lucky: int = -1, **options: Any) -> Any:
    """Steps are shortest with a threshold of `best_kb`, but for one lucky step with any other. Returns the optimizer."""
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16, bias=False) for _ in range(24)))  # 1 KB each
    tuning = Tuning(trials=12, bounds={"threshold_mb": (512 * MB, 65536 * MB)}, **{**EVERY_STEP, **options})
    inner = torch.optim.SGD(model.parameters(), 0.01)
    optimizer: Any = dear.DistributedOptimizer(inner, model, threshold_mb=25, tune=tuning)
    for step in range(steps):
        kb = optimizer.strategy.threshold_mb * 1024
        optimizer.zero_grad()
        model(torch.ones(2, 16)).sum().backward()
        # Every other rank would decide differently if it were asked.
        cost = abs(torch.log2(torch.tensor(kb / best_kb))).item() + 1 if dear.rank() == 0 else 1 / kb
        clock.now += 0.5 if step == lucky and dear.rank() == 0 else cost
        optimizer.step()
    return optimizer


def test_the_best_of_rank_0_stays_everywhere(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    clock = Clock()
    monkeypatch.setattr(trial, "time", clock)
    path = folder / "tuned.json"
    with heard(logging.INFO) as said:
        optimizer = _tuned(clock, 4, 20, path=path)
    found = dear.allgather_object((optimizer.strategy.threshold_mb, _plan(optimizer)))
    assert all(other == found[0] for other in found)
    assert 2 <= found[0][0] * 1024 <= 8
    tables = [text for text in said if "of the start's time" in text]
    assert len(tables) == (dear.rank() == 0)
    assert all(text.count("\ntrial ") <= 11 and text.count(" again ") == 4 for text in tables)
    saved = json.loads(path.read_text())["results"]
    assert [entry["place"]["ranks"] for entry in saved] == [dear.size()]

    monkeypatch.setattr(bayes, "available", lambda: False)  # nobody needs it where a result is found
    again = _tuned(clock, 4, 3, path=path)
    assert again.strategy.threshold_mb == found[0][0]
    if dear.rank() == 0:
        path.write_text("something else")
    dear.barrier()
    with pytest.raises(ValueError, match=r"tuned\.json holds no results"):
        _tuned(clock, 4, 1, path=path)
    with pytest.raises(ValueError, match="there is no folder"):
        _tuned(clock, 4, 1, path=path / "deeper" / "tuned.json")
    with pytest.raises(ImportError, match="pip install bayesian-optimization"):
        _tuned(clock, 4, 1)


def test_a_best_that_was_luck_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(trial, "time", clock)
    optimizer = _tuned(clock, 25 * 1024, 20, lucky=3)
    assert optimizer.strategy.threshold_mb == 25
    assert len(optimizer.buckets) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"threshold_mb": "automatic"}, "should be a number of MB, 'auto' or None and is 'automatic'"),
        ({"threshold_mb": None, "num_nearby_layers": 1, "tune": True}, "as it was chosen has nothing to tune"),
        ({"strategy": "wfbp", "tune": True}, "'wfbp' has nothing to tune"),
        ({"tune": Tuning(bounds={"credit_mb": (1, 2)})}, "'credit_mb', and what is tuned is threshold_mb"),
    ],
)
def test_what_cannot_be_tuned_is_refused(arguments: dict[str, Any], message: str) -> None:
    model = double_model("Mlp")
    with pytest.raises(ValueError, match=message):
        dear.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, **arguments)


@pytest.mark.parametrize(
    ("arguments", "wished_mb", "threshold_mb"),
    [
        ({}, None, 40 / 32),
        ({}, 8.0, 8),
        ({}, "auto", 40 / 32),
        ({"threshold_mb": "auto"}, None, 40 / 32),
        ({"threshold_mb": "auto"}, 8.0, 8),
        ({"threshold_mb": 25}, 8.0, 25),
    ],
)
def test_what_decides_the_threshold(
    arguments: dict[str, Any], wished_mb: float | str | None, threshold_mb: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = current()
    monkeypatch.setattr(session, "settings", dataclasses.replace(session.settings, threshold_mb=wished_mb))
    large = torch.nn.utils.skip_init(torch.nn.Linear, 1024, 10 * 1024, bias=False)
    model = torch.nn.Sequential(large, torch.nn.Linear(16, 16).requires_grad_(False))
    inner = torch.optim.SGD(model.parameters(), 0.1)
    optimizer: Any = dear.DistributedOptimizer(inner, model, sync_start=False, **arguments)
    assert optimizer.strategy.threshold_mb == threshold_mb
