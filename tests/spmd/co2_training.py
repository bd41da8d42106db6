"""A small model under co2, its batches, and what tests compare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import co2
from tests.spmd.models import WIDTH

DOUBLE = torch.float64
FULL: dict[str, Any] = {"outer_lr": 0.8, "outer_momentum": 0.5, "outer_clip": 0.02, "gap_penalty": True}


def _model(dtype: torch.dtype = DOUBLE) -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH)).to(dtype)


def _loss(model: nn.Module, rank: int, step: int, dtype: torch.dtype = DOUBLE) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x, y = (torch.randn(4, WIDTH, generator=generator, dtype=DOUBLE).to(dtype) for _ in range(2))
    return nn.functional.mse_loss(model(x), y)


def _momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, 0.1, momentum=0.9, weight_decay=0.01)


def _adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, 0.01)


def _sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, 0.1)


def _wrapped(make: Callable[[Any], torch.optim.Optimizer] = _momentum, **arguments: Any) -> tuple[nn.Sequential, Any]:
    model = _model()
    return model, co2.DistributedOptimizer(make(model.parameters()), model, **arguments)


def _steps(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        _loss(model, co2.rank(), step).backward()
        optimizer.step()


def _add_and_train(model: nn.Module, optimizer: Any, steps: range) -> nn.Parameter:
    """A parameter that ranks hold with other values, which is added before the first of `steps`, in which it falls."""
    extra = nn.Parameter(torch.full((3,), float(co2.rank()), dtype=DOUBLE))
    optimizer.add_param_group({"params": [extra], "lr": 1.0})
    for step in steps:
        optimizer.zero_grad()
        (_loss(model, co2.rank(), step) + extra.sum() * (co2.rank() + 1)).backward()
        optimizer.step()
    return extra


def _same(model: nn.Module, expected: nn.Module, *, measured_gap: bool = True) -> None:
    """Equal bit for bit at up to two ranks, where no measured gap has been at work.

    That gap is a norm. It is summed over pieces here and over whole tensors in the simulation, and how a processor's
    vectors add up depends on where a piece begins: see docs/architecture.md, "Numerical contract".
    """
    for (name, value), wanted in zip(model.state_dict().items(), expected.state_dict().values(), strict=True):
        if co2.size() <= 2 and not measured_gap:
            assert torch.equal(value, wanted), name
        else:
            torch.testing.assert_close(value, wanted, rtol=1e-12, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")


def _everywhere(model: nn.Module) -> bool:
    flat = torch.cat([value.detach().flatten() for value in model.state_dict().values()])
    return all(torch.equal(flat, other) for other in co2.allgather_object(flat))
