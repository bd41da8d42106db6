"""A profile of the user's own model, measured while it trains: its layers, their bytes, and how long they take."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dear
from overlap.optimizer.layer_times import durations
from overlap.plan.simulation.profile import from_text


class _Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return grads[0], None


class _Layer(nn.Linear):
    """Takes `seconds` in forward and twice as many in backward, before its gradients."""

    seconds = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Slow.apply(super().forward(x), self.seconds)  # type: ignore[no-untyped-call]


def test_layers_are_measured_without_what_they_wait_for(tmp_path: Path) -> None:
    torch.default_generator.manual_seed(1)
    model = nn.Sequential(_Layer(8, 8), nn.ReLU(), _Layer(8, 8), _Layer(8, 4))
    model[0].seconds, model[2].seconds = 0.02, 0.01  # type: ignore[assignment]
    optimizer = dear.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, threshold_mb=0)
    path = tmp_path / "mine.json"
    optimizer.save_profile(path, steps=4, batch_size=5)
    for step in range(6):
        assert path.exists() is (dear.rank() == 0 and step > 4)
        optimizer.zero_grad()
        model(torch.ones(5, 8)).sum().backward()
        if dear.rank() == 1:
            time.sleep(0.3)  # for which rank 0 waits in the next forward, and in step()
        optimizer.step()
    if dear.rank() > 0:
        assert not path.exists()
        return
    profile = from_text(path.read_text())
    assert (profile.model, profile.batch_size) == ("Sequential", 5)
    assert profile.source.startswith("measured in 4 steps")
    assert [(layer.name, layer.tensors) for layer in profile.layers] == [
        ("0", (256, 32)),
        ("2", (256, 32)),
        ("3", (128, 16)),
    ]
    first, second, third = profile.layers
    assert 0.02 <= first.forward < 0.2
    assert 0.04 <= first.backward < 0.2
    assert 0.01 <= second.forward < 0.2
    assert 0.02 <= second.backward < 0.2
    assert third.forward + third.backward < 0.2


def test_what_cannot_be_measured_raises() -> None:
    model = nn.Linear(2, 2)
    inner = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = dear.DistributedOptimizer(inner, model.named_parameters())
    with pytest.raises(ValueError, match="measures the layers of a module"):
        optimizer.save_profile("x.json")
    with pytest.raises(ValueError, match="at least 1 and are 0 and 1"):
        optimizer.save_profile("x.json", steps=0)


def test_durations_are_medians_of_passes_with_gradients() -> None:
    lap = {
        "entered": {"a": 0.0, "b": 3.0},
        "begun": {"a": 1.0, "b": 3.5},  # a waited for a second, b for half of one
        "ended": {"a": 2.0, "b": 4.0},
        "gradient": {"b": 6.0, "a": 9.0},
    }
    late = {kind: {name: 2 * value for name, value in stamps.items()} for kind, stamps in lap.items()}
    nothing = {**lap, "gradient": {}}
    assert durations([lap, lap, late, nothing, {}]) == {"a": (2.0, 3.0), "b": (0.5, 2.0)}
