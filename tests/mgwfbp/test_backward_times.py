"""Profiling finds the slow layer and leaves no trace in the model or the process."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from mgwfbp.backward_times import BackwardClock, arrival_moments, backward_seconds, profile_backward
from overlap.transport.stamps import Stamps
from tests.spmd.models import Pause


class _Model(nn.Module):
    """Everything that a forward pass may leave behind: statistics, random numbers, counts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.never = nn.Parameter(torch.ones(3))
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1  # another tensor
        x = nn.functional.dropout(self.norm(self.first(x)), 0.5)
        return self.last(Pause.apply(x + random.random() + float(numpy.random.rand())))


def test_times_name_the_slow_place_and_nothing_is_left_behind() -> None:
    torch.manual_seed(3)
    model = _Model()
    x = torch.randn(8, 4)
    model(x).sum().backward()
    calls = model.calls
    held = {name: param.grad for name, param in model.named_parameters()}
    values = {name: None if grad is None else grad.clone() for name, grad in held.items()}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    expected = None
    for profiled in (False, True):
        torch.manual_seed(5)
        random.seed(5)
        numpy.random.seed(5)
        if profiled:
            times = profile_backward(model, lambda: model(x).sum(), warmup=1, iterations=3)
        drawn = (torch.rand(3).tolist(), random.random(), float(numpy.random.rand()))
        assert expected is None or drawn == expected
        expected = drawn
    assert next(name for name, seconds in times.items() if seconds > 0.015).startswith("norm.")
    assert set(list(times)[:2]) == {"last.weight", "last.bias"}
    assert "never" not in times
    assert 0.02 < sum(times.values()) < 0.2
    for name, param in model.named_parameters():
        assert param.grad is held[name]
        assert values[name] is None or torch.equal(param.grad, values[name])
        assert not param._post_accumulate_grad_hooks
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[name]), name
    assert model.calls is calls


def test_passes_that_warm_up_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now, passes = count(), count()
    pace = 1000  # by the clock, of which each look is so much later

    def compute_loss() -> torch.Tensor:
        nonlocal pace
        pace = 1000 if next(passes) < 2 else 1
        return model(torch.ones(1, 2)).sum()

    monkeypatch.setattr(Stamps, "now", lambda _: pace * next(now))
    model = nn.Linear(2, 2)
    assert profile_backward(model, compute_loss, warmup=2, iterations=1) == {"weight": 1, "bias": 1}


def test_hooks_and_state_go_back_even_if_the_loss_fails() -> None:
    model = _Model()

    def fail() -> torch.Tensor:
        model(torch.ones(2, 4))
        raise OSError("no more data")

    with pytest.raises(OSError, match="no more data"):
        profile_backward(model, fail)
    assert not model.first.weight._post_accumulate_grad_hooks
    assert model.calls == 0


def test_what_cannot_be_profiled() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="at least 1; they are 0 and 0"):
        profile_backward(model, lambda: model(torch.ones(1, 2)).sum(), warmup=0, iterations=0)
    with pytest.raises(ValueError, match="reaches no parameter"):
        profile_backward(nn.ReLU(), lambda: torch.ones((), requires_grad=True) * 1)
    with pytest.raises(ValueError, match="reaches no parameter"):
        profile_backward(model, lambda: torch.ones((), requires_grad=True) * 1)


def test_the_last_arrival_of_a_window_counts() -> None:
    weight = nn.Parameter(torch.ones(2))
    clock = BackwardClock([weight], Stamps())
    weight.sum().backward()
    between = time.perf_counter()
    weight.sum().backward()
    lap = clock.lap()
    assert between < lap[0] <= time.perf_counter()
    assert clock.lap() == {}
    clock.remove()
    weight.sum().backward()
    assert clock.lap() == {}


class _Launching(Stamps):
    """Of a device that takes a second for each gradient, long after all were launched."""

    def __init__(self) -> None:
        self.made = 0

    def now(self) -> list[float]:
        self.made += 1
        return [float(self.made)]

    def reader(self) -> Callable[[Any], float]:
        return lambda stamp: 1000.0 + stamp[0]


def test_gradients_of_a_device_arrive_when_it_has_computed_them() -> None:
    first, last = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    clock = BackwardClock([first, last], _Launching())
    (last * torch.sin(first)).sum().backward()
    laps = [clock.lap()]
    assert sorted(clock.seconds(laps)[0].values()) == [1001.0, 1002.0]
    assert set(arrival_moments(clock.seconds(laps)).values()) == {0.0, 1.0}


@pytest.mark.parametrize(
    ("order", "laps", "expected"),
    [
        ([2, 1, 0], [{2: 5.0, 1: 6.0, 0: 8.0}], [0, 1, 2]),  # from the first arrival
        ([2, 1, 0], [{-1: 4.0, 2: 5.0, 1: 6.0, 0: 8.0}], [1, 1, 2]),  # from the lap's beginning
        ([0, 1], [{0: 1.0, 1: 2.0}, {0: 5.0, 1: 9.0}, {0: 7.0, 1: 9.0}], [0, 2]),  # the median
        ([0, 1, 2], [{0: 1.0, 1: 3.0, 2: 2.0}], [0, 2, 0]),  # 2 overtook 1: sent after it
        ([0, 1, 2], [{0: 1.0, 2: 3.0}], [0, 0, 2]),  # 1 never came
        ([0, 1, 2], [{1: 3.0, 2: 4.0}], [0, 0, 1]),  # the first never came
        ([0, 1], [], [0, 0]),
    ],
)
def test_backward_seconds(order: list[int], laps: list[dict[int, float]], expected: list[float]) -> None:
    assert list(backward_seconds(order, laps)) == expected


def test_moments_are_medians_after_the_first_gradient() -> None:
    laps = [{2: 5.0, 1: 6.0}, {2: 15.0, 1: 18.0, 0: 19.0}, {1: 27.0, 2: 25.0}]
    assert arrival_moments(laps) == {2: 0.0, 1: 2.0, 0: 4.0}
    assert arrival_moments([{}, {}]) == {}
