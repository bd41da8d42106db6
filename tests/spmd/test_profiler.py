"""torch's profiler shows what is sent and waited for, while it profiles."""

from __future__ import annotations

import gc
import time

import torch
from torch.profiler import ProfilerActivity, profile

import dear
from overlap.transport.work import ProfiledWork


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


def test_operations_and_waits_are_shown() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    inner = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = dear.DistributedOptimizer(inner, model, threshold_mb=0)
    for _ in range(3):
        _step(model, optimizer)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        if dear.rank() == 0:
            time.sleep(0.2)  # for which the others wait
        _step(model, optimizer)
        _step(model, optimizer)
    shown = {event.name for event in profiled.events() if event.name.startswith("dear::")}
    assert {"dear::reduce_scatter b0", "dear::all_gather b1"} <= {" ".join(name.split()[:2]) for name in shown}
    del profiled
    gc.collect()  # parameters were on their way when it ended
    if dear.rank() > 0:
        assert any(name.startswith("dear::wait ") for name in shown), shown
    _step(model, optimizer)
    assert not any(isinstance(bucket.work, ProfiledWork) for bucket in optimizer.buckets)
