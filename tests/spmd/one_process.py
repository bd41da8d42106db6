"""A script that is run in one process on everything, and by every rank on its part: parameters have to be the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import dear
from tests.spmd.strategies import WRAP

__all__ = ["SGD", "WAYS", "as_in_one_process", "loss_of", "small_model", "train"]

GLOBAL_BATCH = 8
# One for each way of updating; early updates can be asked for nothing between backward and step().
WAYS = ("dear-layerwise", "wfbp", "bytescheduler", "oss")
SGD = torch.optim.SGD


def small_model() -> torch.nn.Module:
    torch.default_generator.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Tanh(), torch.nn.Linear(10, 3)).double()


def loss_of(model: torch.nn.Module, number: int, alone: bool) -> torch.Tensor:
    """On the whole batch, or on this rank's part of it."""
    x = torch.randn(GLOBAL_BATCH, 6, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
    share = GLOBAL_BATCH // dear.size()
    part = x if alone else x[dear.rank() * share : (dear.rank() + 1) * share]
    return model(part).square().mean()


Script = Callable[[torch.nn.Module, Any, bool], None]


def as_in_one_process(
    way: str,
    script: Script,
    make: Callable[..., Any] = SGD,
    build: Callable[[], torch.nn.Module] = small_model,
    **options: Any,
) -> torch.nn.Module:
    """Run `script` with a plain optimizer on everything, and with a distributed one; parameters have to be the same.

    They are NaN in the same places, too.
    """
    settings = {"lr": 0.1, "momentum": 0.9}
    reference, model = build(), build()
    script(reference, make(reference.parameters(), **settings), True)
    optimizer = WRAP[way](make(model.parameters(), **settings), model, **options)
    script(model, optimizer, False)
    optimizer.synchronize()
    saved = model.state_dict()
    for name, theirs in reference.named_parameters():
        ours = saved[name]
        torch.testing.assert_close(
            ours, theirs, rtol=1e-9, atol=1e-12, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}"
        )
    return model


def train(model: torch.nn.Module, optimizer: Any, alone: bool, steps: int = 2, first: int = 0) -> None:
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss_of(model, step, alone).backward()
        optimizer.step()
