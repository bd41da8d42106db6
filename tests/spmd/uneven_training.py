"""Training with uneven data: strategies, two models, and what follows a join() that has failed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dear
from overlap.features.join import CannotJoin, joined_ranks_of
from overlap.job.session import current
from overlap.transport.operation import barrier
from tests.spmd.loops import Run
from tests.spmd.models import double_model
from tests.spmd.strategies import OPTIMIZERS
from tests.spmd.strategies import WRAP as PATIENT

__all__ = ["WRAP", "backward_of", "end_of_a_failed_join", "two_runs"]

# Early updates as they happen to come: a gradient hook must not wait for ranks that have joined.
LIKE_OTHERS = ("dear-layerwise",)
WRAP = {name: wrap for name, wrap in PATIENT.items() if name not in LIKE_OTHERS} | {
    "dear-eager": lambda o, m, **k: dear.DistributedOptimizer(o, m, eager=True, threshold_mb=0.001, **k)
}


def backward_of(run: Run, batch: tuple[torch.Tensor, torch.Tensor], scale: float = 1.0) -> torch.Tensor:
    loss = torch.nn.functional.mse_loss(run.model(batch[0]), batch[1]) * scale
    loss.backward()
    return loss


def two_runs(strategy: str) -> list[Run]:
    """Of two models with an optimizer each; in one process, if no strategy is named."""
    runs = []
    for name, optimizer_name in (("Mlp", "sgd"), ("Sometimes", "adamw")):
        model = double_model(name)
        optimizer: Any = OPTIMIZERS[optimizer_name](list(model.parameters()))
        runs.append(Run(model, optimizer, None, dear.size()))
        if strategy:
            runs[-1].optimizer, runs[-1].rank = WRAP[strategy](optimizer, model), dear.rank()
    return runs


def end_of_a_failed_join(meanwhile: Callable[[], Any] = dear.barrier) -> None:
    """Nothing goes on until all ranks have called join(), the one where it raised again."""
    current().control.run(barrier())  # of what is not asked for by name
    with contextlib.suppress(CannotJoin):
        while True:  # news of it may be on their way
            joined_ranks_of(current()).check()
    with pytest.raises(CannotJoin, match=r"join\(\) has failed on rank \d, and nothing goes on"):
        meanwhile()
    current().control.run(barrier())
    if dear.rank() % 2:
        time.sleep(0.02)
    dear.join()
    assert dear.allreduce(torch.tensor([dear.rank() + 1]), op=dear.Sum).item() == sum(range(dear.size() + 1))
