"""ByteScheduler where it meets other ranks: rank 0's order everywhere, the urgent first, updates when they are needed."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

import bytescheduler_adapter as hvd
import dear
from overlap.bucket import Phase
from overlap.session import current
from overlap.window import GradientChanged
from tests.spmd.loops import Run
from tests.spmd.models import WIDTH
from tests.spmd.test_parity import _assert_close


@pytest.fixture(autouse=True)
def _session() -> None:
    dear.init()


def _layers(number: int = 4, width: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(number))).double()


def _wrapped(model: nn.Module, **arguments: Any) -> Any:
    inner = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    return hvd.DistributedOptimizer(inner, model, **{"partition_mb": 0.0002, "credit_mb": 0.0001, **arguments})


def _backward(model: nn.Module, optimizer: Any, step: int = 0) -> None:
    optimizer.zero_grad()
    Run(model, optimizer, dear.rank(), dear.size()).loss(step).backward()


def _record(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    issued: list[str] = []
    channel = current().channels.named("bytescheduler")
    original = type(channel).all_reduce_async

    def note(self: Any, *args: Any, label: str = "", **kwargs: Any) -> Any:
        if self is channel:
            issued.append(label)
            time.sleep(0.002)  # so that gradients arrive faster than they leave
        return original(self, *args, label=label, **kwargs)

    monkeypatch.setattr(type(channel), "all_reduce_async", note)
    return issued


def test_all_ranks_issue_in_one_order_and_the_urgent_preempt(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _layers(6)
    optimizer = _wrapped(model)
    issued = _record(monkeypatch)
    for step in range(4):
        _backward(model, optimizer, step)
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


def test_the_next_forward_is_released_layer_by_layer() -> None:
    model = _layers()
    optimizer = _wrapped(model)
    for step in range(2):
        _backward(model, optimizer, step)
        optimizer.step()
    assert [bucket.phase for bucket in optimizer.buckets] == [Phase.DUE] * 4
    held = model[1].weight  # a look at one layer …
    assert [bucket.phase for bucket in optimizer.buckets].count(Phase.DUE) == 3  # … waits for that one alone
    assert bool(torch.isfinite(held).all())
    optimizer.synchronize()
    assert [bucket.phase for bucket in optimizer.buckets] == [Phase.FILLING] * 4


def test_hyper_parameters_are_those_of_the_step() -> None:
    def train(distributed: bool) -> Any:
        model = _layers()
        optimizer: Any = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        if distributed:
            optimizer = _wrapped(model)
        run = Run(model, optimizer, dear.rank() if distributed else None, dear.size())
        for step in range(4):
            optimizer.zero_grad()
            run.loss(step).backward()
            optimizer.step()
            optimizer.param_groups[0]["lr"] *= 0.1  # before the next forward makes the update
        return model.state_dict(), optimizer.state_dict()

    actual, expected = train(True), train(False)
    _assert_close(actual[0], expected[0], "model")
    _assert_close(actual[1], expected[1], "optimizer")


def test_rank_0_saves_alone_and_evaluates_in_inference_mode() -> None:
    model = _layers()
    optimizer = _wrapped(model)
    for step in range(3):
        _backward(model, optimizer, step)
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
        _backward(model, optimizer, step)
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
    optimizer = dear.DistributedOptimizer(inner, model, strategy="bytescheduler_adapter", credit_mb=2)
    assert optimizer.strategy.setting == {"partition_mb": 1, "credit_mb": 2}
