"""Scripts as DeAR's own repository has them: the call of its benchmarks, and ByteScheduler's."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

import bytescheduler_adapter as bsc
import dear
from tests.overlap.optimizer.test_dears_arguments import PASSED
from tests.spmd.models import double_model


def _train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + dear.rank())
        optimizer.zero_grad()
        model(torch.randn(4, 9, generator=generator, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
    return [param.detach().clone() for param in model.parameters()]


def _sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)


@pytest.mark.parametrize("strategy", ["dear", "wfbp", "mgwfbp"])
def test_the_call_of_their_benchmarks_trains_as_ours(strategy: str) -> None:
    package: Any = importlib.import_module(strategy)
    given = {**PASSED, "model": (theirs := double_model("Mlp")), "mgwfbp": strategy == "mgwfbp"}
    if strategy == "dear":
        given["exclude_parts"] = ""
    optimizer = package.DistributedOptimizer(_sgd(theirs), **given)
    package.broadcast_parameters(theirs.state_dict(), root_rank=0)
    ours = double_model("Mlp")
    expected = _train(ours, package.DistributedOptimizer(_sgd(ours), ours))
    torch.testing.assert_close(_train(theirs, optimizer), expected, rtol=1e-12, atol=1e-12)


def test_their_threshold_decides_what_travels_together() -> None:
    tensors = len(list(double_model("Mlp").parameters()))
    expected = {("wfbp", -1): 1, ("wfbp", 0): tensors, ("dear", 2**20): 1, ("oss", -1): 1}
    expected |= {("mgwfbp", -1): 1, ("mgwfbp", 0): tensors}
    for (strategy, threshold), buckets in expected.items():
        model = double_model("Mlp")
        optimizer: Any = importlib.import_module(strategy).DistributedOptimizer(
            _sgd(model), model=model, threshold=threshold, mgwfbp=False
        )
        _train(model, optimizer)
        assert len(optimizer.buckets) == buckets, strategy
        assert strategy != "mgwfbp" or not optimizer.tuning  # it has nothing to measure
    assert dear.DistributedOptimizer(_sgd(model), model=model, threshold=2**20).strategy.threshold_mb == 4  # type: ignore[call-arg,attr-defined]


def test_bytescheduler_is_called_around_the_distributed_optimizer() -> None:
    bsc.init()
    theirs, ours = double_model("Mlp"), double_model("Mlp")
    inner = _sgd(theirs)
    distributed = bsc.DistributedOptimizer(inner, named_parameters=theirs.named_parameters(), op=bsc.Average)
    optimizer = bsc.ScheduledOptimizer(theirs, distributed, 3)
    assert optimizer is distributed
    bsc.broadcast_optimizer_state(optimizer, root_rank=0)
    fresh = bsc.ScheduledOptimizer(ours, _sgd(ours))
    torch.testing.assert_close(_train(theirs, optimizer), _train(ours, fresh), rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match=r"has \d+ parameters that are not the model's"):
        bsc.ScheduledOptimizer(double_model("Mlp"), optimizer, 3)
    with pytest.raises(ValueError, match="num_steps should be a whole number of at least 1 and is 0"):
        bsc.ScheduledOptimizer(theirs, optimizer, 0)
    with pytest.raises(TypeError, match="takes the model first"):
        bsc.ScheduledOptimizer(optimizer, theirs, 3)  # type: ignore[arg-type]
    other = double_model("Mlp")
    with pytest.raises(TypeError, match="the strategy 'dear' has distributed"):
        bsc.ScheduledOptimizer(other, dear.DistributedOptimizer(_sgd(other), other), 3)
