"""ByteScheduler where it meets other ranks: rank 0's order everywhere, the urgent first, updates when they are needed."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
import torch
from torch import nn

import bytescheduler_adapter as hvd
import dear
from overlap.core.bucket import Phase
from overlap.core.round import GradientChanged
from overlap.job import settings
from overlap.job.session import current
from overlap.optimizer import tuning as trial
from overlap.plan.tuning.options import Tuning
from overlap.transport.operation import Operation
from tests.spmd.loops import Run
from tests.spmd.models import WIDTH, adafactor
from tests.spmd.planned_training import Clock
from tests.spmd.training import assert_close, backward


def _layers(number: int = 4, width: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(number))).double()


def _wrapped(model: nn.Module, rate: Any = 0.05, **arguments: Any) -> Any:
    inner = torch.optim.SGD(model.parameters(), rate, momentum=0.9)
    return hvd.DistributedOptimizer(inner, model, **{"partition_mb": 0.0002, "credit_mb": 0.0001, **arguments})


def _record(optimizer: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    issued: list[str] = []
    channel = optimizer.strategy.lease._dispatcher._channel
    original = type(channel).start

    def note(self: Any, operation: Operation) -> Any:
        if self is channel:
            issued.append(operation.label)
            time.sleep(0.002)  # so that gradients arrive faster than they leave
        return original(self, operation)

    monkeypatch.setattr(type(channel), "start", note)
    return issued


def test_all_ranks_issue_in_one_order_and_the_urgent_preempt(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _layers(6)
    optimizer = _wrapped(model)
    issued = _record(optimizer, monkeypatch)
    for step in range(4):
        backward(model, optimizer, step)
        optimizer.step()
        optimizer.synchronize()
    everywhere = dear.allgather_object(issued)
    assert all(other == everywhere[0] for other in everywhere)
    parts = sorted({label.split(".")[1] for label in issued})
    assert len(parts) > 1
    assert len(issued) == 4 * 6 * len(parts)
    # In the first iteration everything is ready at once, in step(): strictly the input's layers first.
    first = issued[: 6 * len(parts)]
    assert first[len(parts) :] == sorted(first[len(parts) :], key=lambda label: int(label[1:].split(".")[0]))
    # Later, the layers nearest the input come last and still overtake partitions of others that wait.
    last = issued[-6 * len(parts) :]
    assert last.index("b0.0") < max(last.index(f"b{layer}.{parts[-1]}") for layer in range(1, 6))


class Branching(nn.Module):
    """Rank 0 alone uses the branch; so does one process."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.branch = (nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor, branching: bool) -> torch.Tensor:
        value: torch.Tensor = self.trunk(x)
        return value + self.branch(x) if branching else value


def test_optimizers_that_share_a_backward_do_not_wait_for_each_others_step() -> None:
    """Which parameters a rank uses differs; the first step() waits inside, for an optimizer that is stepped in full."""

    def train(distributed: bool) -> Any:
        torch.manual_seed(5)
        first, second = Branching().double(), Branching().double()
        models = (first, second)
        optimizers: list[Any] = [adafactor(model.parameters(), 0.01) for model in models]
        if distributed:
            pairs = zip(optimizers, models, strict=True)
            optimizers = [hvd.DistributedOptimizer(one, model, partition_mb=0.0002) for one, model in pairs]
        ranks = [dear.rank()] if distributed else range(dear.size())
        for step in range(4):
            for optimizer in optimizers:
                optimizer.zero_grad()
            for rank in ranks:
                x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank)).double()
                loss = second(first(x, rank == 0), rank == 0).square().mean()
                (loss / (1 if distributed else dear.size())).backward()
            for optimizer in optimizers:
                optimizer.step()
        return [model.state_dict() for model in models]

    assert_close(train(True), train(False), "models")


def test_the_next_forward_is_released_layer_by_layer() -> None:
    model = _layers()
    optimizer = _wrapped(model)
    for step in range(2):
        backward(model, optimizer, step)
        optimizer.step()
    assert [bucket.phase for bucket in optimizer.buckets] == [Phase.DUE] * 4
    held = model[1].weight  # a look at one layer …
    assert [bucket.phase for bucket in optimizer.buckets].count(Phase.DUE) == 3  # … waits for that one alone
    assert bool(torch.isfinite(held).all())
    optimizer.synchronize()
    assert [bucket.phase for bucket in optimizer.buckets] == [Phase.FILLING] * 4


@pytest.mark.parametrize("rate", [float, torch.tensor])
def test_hyper_parameters_are_those_of_the_step(rate: Any) -> None:
    """A rate that is a tensor is changed where it lies."""

    def train(distributed: bool) -> Any:
        model = _layers()
        optimizer: Any = torch.optim.SGD(model.parameters(), rate(0.05), momentum=0.9)
        if distributed:
            optimizer = _wrapped(model, rate(0.05))
        run = Run(model, optimizer, dear.rank() if distributed else None, dear.size())
        for step in range(4):
            optimizer.zero_grad()
            run.loss(step).backward()
            optimizer.step()
            optimizer.param_groups[0]["lr"] *= 0.1  # before the next forward makes the update
        return model.state_dict(), optimizer.state_dict()

    actual, expected = train(True), train(False)
    assert_close(actual[0], expected[0], "model")
    assert_close(actual[1], expected[1], "optimizer")


def test_rank_0_saves_alone_and_evaluates_in_inference_mode() -> None:
    model = _layers()
    optimizer = _wrapped(model)
    for step in range(3):
        backward(model, optimizer, step)
        optimizer.step()
        if dear.rank() == 0:
            with torch.inference_mode():
                assert bool(torch.isfinite(model(torch.ones(1, WIDTH, dtype=torch.float64))).all())
            saved = optimizer.state_dict()["state"][0]["momentum_buffer"].clone()
    last = dear.broadcast(optimizer.state_dict()["state"][0]["momentum_buffer"], 0)
    if dear.rank() == 0:
        assert torch.equal(saved, last)


def test_a_gradient_changed_under_way_is_refused() -> None:
    model = _layers()
    optimizer = _wrapped(model)
    held = list(model.parameters())
    for step in range(2):
        backward(model, optimizer, step)
        optimizer.step()
    held[0].grad.zero_()
    with pytest.raises(GradientChanged, match="changed after step"):
        optimizer.synchronize()


@pytest.mark.parametrize("name", ["partition_mb", "credit_mb"])
def test_bad_arguments(name: str) -> None:
    model = _layers()
    with pytest.raises(ValueError, match=f"{name} should be above 0 and is 0"):
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, **{name: 0})


def test_dear_is_the_front_door() -> None:
    model = _layers()
    inner = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = dear.DistributedOptimizer(inner, model, strategy="bytescheduler_adapter", credit_mb=3)
    assert optimizer.strategy.setting == {"partition_mb": 1, "credit_mb": 3}


def test_another_plan_sends_other_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _layers(2)
    optimizer = _wrapped(model, partition_mb=1)
    before = [part.label for part in _parts_of_a_step(model, optimizer, monkeypatch)]
    optimizer.replan(optimizer.strategy.at({"partition_mb": 0.0002, "credit_mb": 2}))
    after = _parts_of_a_step(model, optimizer, monkeypatch)
    assert len(after) > len(before)
    assert max(part.nbytes for part in after) <= 0.0002 * 2**20


def _parts_of_a_step(model: nn.Module, optimizer: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    sent: list[Any] = []
    lease = optimizer.strategy.lease
    submit = type(lease).submit

    def note(self: Any, bucket: int, parts: list[Any], *rest: Any) -> Any:
        sent.extend(parts)
        return submit(self, bucket, parts, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(type(lease), "submit", note)
        backward(model, optimizer)
        optimizer.step()
    optimizer.synchronize()
    return sent


def test_tuning_searches_both_and_keeps_the_best_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(trial, "time", clock)
    kb = 2**-10
    bounds = {"partition_mb": (0.25 * kb, 16 * kb), "credit_mb": (0.25 * kb, 16 * kb)}
    tuning = Tuning(trials=8, warmup=0, window=1, pairs=1, bounds=bounds)
    model, plain_model = _layers(), _layers()
    optimizer = _wrapped(model, partition_mb=8 * kb, credit_mb=0.5 * kb, tune=tuning)
    plain = torch.optim.SGD(plain_model.parameters(), 0.05, momentum=0.9)
    settings, costs = [], []
    for step in range(16):
        setting = dict(optimizer.strategy.setting)
        backward(model, optimizer, step)
        off = abs(math.log2(setting["partition_mb"] / kb)) + abs(math.log2(setting["credit_mb"] / (4 * kb)))
        clock.now += off + 1 if dear.rank() == 0 else 1 / (off + 1)  # every other rank would decide differently
        optimizer.step()
        settings.append(setting)
        costs.append(off)
        plain.zero_grad()
        Run(plain_model, plain, None, dear.size()).loss(step).backward()
        plain.step()
    assert all(other == settings for other in dear.allgather_object(settings))
    assert len({tuple(setting.values()) for setting in settings}) == 8
    assert settings[-1] == settings[-2] == settings[costs.index(min(costs))]
    assert min(costs) < costs[0]
    assert_close(model.state_dict(), plain_model.state_dict(), "model")


@pytest.mark.parametrize("given", [{}, {"credit_mb": 3.0}])
def test_byteschedulers_own_variables_count_where_nothing_is_given(
    given: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are numbers of elements of four bytes. DeAR's scripts set them."""
    environ = {"BYTESCHEDULER_PARTITION": "4000000", "BYTESCHEDULER_CREDIT": "16000000"}
    session = current()
    monkeypatch.setattr(session, "settings", settings.read(environ))
    model = torch.nn.Linear(2, 2)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, **given)
    assert optimizer.strategy.setting == {"partition_mb": 4e6 / 2**18, "credit_mb": 16e6 / 2**18, **given}
    assert not optimizer.tuning
    monkeypatch.setattr(session, "settings", settings.read({"BYTESCHEDULER_CREDIT_TUNING": "1"}))
    tuned = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, **given)
    assert tuned.tuning
