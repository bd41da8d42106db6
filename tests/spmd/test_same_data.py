"""A script that gives every rank the same batch is told so, once; one that shards its data is not."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import dear
from overlap.core.bucket import Slot
from overlap.features import same_data
from tests.spmd.listening import heard
from tests.spmd.strategies import PACKAGES, WRAP


def _told(way: str, seed: int, build: Any = lambda: nn.Linear(6, 3), **options: Any) -> list[str]:
    torch.default_generator.manual_seed(1)
    model = build()
    with heard(logging.WARNING) as said:
        optimizer = WRAP[way](torch.optim.SGD(model.parameters(), 0.1), model, **options)
        for step in range(3):
            generator = torch.Generator().manual_seed(seed + 10 * step)
            x = torch.randn(4, 6, generator=generator)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        optimizer.synchronize()
    return [text for text in said if "is the data sharded?" in text]


@pytest.mark.parametrize("way", PACKAGES)
def test_the_same_batch_on_all_ranks_is_said_once(way: str) -> None:
    found = _told(way, 5)
    assert len(found) == (1 if dear.size() > 1 and dear.rank() == 0 else 0)
    assert all("DistributedSampler" in text for text in found)


@pytest.mark.parametrize("way", PACKAGES)
def test_sharded_data_is_nothing_to_say(way: str) -> None:
    assert not _told(way, 5 + dear.rank())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_looking_at_a_large_gradient_takes_little_memory(dtype: torch.dtype) -> None:
    large = nn.Parameter(torch.zeros(2**24, dtype=dtype))
    large.grad = torch.ones_like(large)
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        sums = same_data._fingerprint([Slot(0, "large", large, 0)])
    assert sums == [pytest.approx(2**12)]
    assert max(event.cpu_memory_usage for event in profile.function_events) < large.nbytes


def test_a_rank_without_gradients_has_not_the_same() -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) if dear.rank() == 0 else x.sum().requires_grad_()

    assert not _told("dear", 5, Idle) or dear.size() == 1
