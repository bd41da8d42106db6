"""What many suites train a few steps with, and how they compare what comes of it."""

from __future__ import annotations

from typing import Any

import torch

import dear
from tests.spmd.loops import Run
from tests.spmd.test_parity import WRAP, _model

__all__ = ["backward", "local_loss", "same_everywhere", "same_values", "trained"]


def local_loss(
    model: torch.nn.Module, step: int = 0, rank: int | None = None, width: int = 9, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """Of four rows that are of this step and of `rank`, which is this one if none is given."""
    generator = torch.Generator().manual_seed(100 * step + (dear.rank() if rank is None else rank))
    return model(torch.randn(4, width, generator=generator, dtype=dtype)).square().mean()


def backward(model: torch.nn.Module, optimizer: Any, step: int = 0) -> None:
    optimizer.zero_grad()
    Run(model, optimizer, dear.rank(), dear.size()).loss(step).backward()


def trained(strategy: str = "dear", steps: int = 2, **options: Any) -> tuple[torch.nn.Module, Any]:
    model = _model("Mlp")
    optimizer = WRAP[strategy](torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, **options), model)
    for step in range(steps):
        optimizer.zero_grad()
        local_loss(model, step).backward()
        optimizer.step()
    return model, optimizer


def same_values(mine: torch.nn.Module, reference: torch.nn.Module) -> None:
    """Bit for bit, buffers too."""
    for (name, value), other in zip(mine.state_dict().items(), reference.state_dict().values(), strict=True):
        assert torch.equal(value, other), name


def same_everywhere(value: Any) -> None:
    values = dear.allgather_object(value)
    assert all(torch.equal(other, values[0]) for other in values)
