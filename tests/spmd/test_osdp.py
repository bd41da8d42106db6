"""Buckets that stay whole for different times in one optimizer, and the choice among them under a limit on memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dear
from fsdp.optimizer import Fsdp
from overlap.optimizer.arguments import SharedArguments
from overlap.optimizer.distributed import DistributedOptimizer as Shell
from overlap.plan.partition import BucketSpec
from overlap.plan.plan import Residency
from tests.spmd.training import local_loss, values_of
from tests.spmd_plugin import SIZE


class Mixed(Fsdp):
    """Every way for a bucket to be whole, in turn."""

    def residency(self, spec: BucketSpec) -> Residency:
        return list(Residency)[spec.tensors[0] // 2 % len(Residency)]


def _model(layers: int = 9) -> torch.nn.Module:
    torch.default_generator.manual_seed(3)
    parts = [part for _ in range(layers) for part in (torch.nn.Linear(9, 9), torch.nn.Tanh())]
    return torch.nn.Sequential(*parts).double()


def _trained(wrap: Any, passes: int = 1, steps: int = 4) -> list[torch.Tensor]:
    model = _model()
    optimizer = wrap(torch.optim.AdamW(model.parameters(), 0.01), model)
    ranks = list(range(SIZE)) if optimizer.__class__ is torch.optim.AdamW else [dear.rank()]
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(passes):
            for rank in ranks:
                (local_loss(model, passes * step + part, rank) / len(ranks)).backward()
        if step == 1:
            with torch.no_grad():
                local_loss(model)
        optimizer.step()
    return values_of(model)


def _mixed(optimizer: torch.optim.Optimizer, model: torch.nn.Module, passes: int = 1) -> Shell:
    return Shell(optimizer, model, Mixed(None, 1, None), SharedArguments(backward_passes_per_step=passes))


@pytest.mark.parametrize("passes", [1, 3])
def test_buckets_of_one_optimizer_may_be_whole_for_different_times(passes: int) -> None:
    mine = _trained(lambda *given: _mixed(*given, passes), passes)
    for value, expected in zip(mine, _trained(lambda optimizer, _model: optimizer, passes), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-12)


def test_buckets_that_are_kept_until_the_step_are_gathered_once() -> None:
    class Kept(Fsdp):
        def residency(self, spec: BucketSpec) -> Residency:
            return Residency.FREED_IN_STEP

    model = _model()
    optimizer = Shell(
        torch.optim.SGD(model.parameters(), 0.1),
        model,
        Kept(None, 1, None),
        SharedArguments(backward_passes_per_step=2),
    )
    unsharder = optimizer._engine.unsharder
    for step in range(3):
        before = unsharder.gathered
        for part in range(2):
            local_loss(model, 2 * step + part).backward()
        with torch.no_grad():
            local_loss(model)
        assert unsharder.gathered - before == (len(optimizer.buckets) if step == 0 else 0), "step() has begun with it"
        optimizer.step()
        optimizer.zero_grad()
