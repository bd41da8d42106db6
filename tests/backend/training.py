"""Small models, each rank's share of the data, and what one process would learn from all of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from tests.backend.world import ALL
from tests.spmd_plugin import RANK

try:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
except ImportError:  # their place before torch 2.6
    from torch.distributed._composable.fsdp import MixedPrecisionPolicy, fully_shard

__all__ = [
    "MixedPrecisionPolicy",
    "alone",
    "close",
    "fully_shard",
    "loss_of",
    "model_of",
    "my_batch",
    "parameters_of",
    "sgd",
    "train",
    "whole_batch",
]

ROWS, WIDTH, OUT = 4, 6, 3
Make = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]


def model_of(blocks: int = 3, width: int = WIDTH) -> nn.Sequential:
    """In double precision, where another order of sums is told from a mistake; the last rows divide by no rank."""
    torch.manual_seed(3)
    inner = [layer for _ in range(blocks) for layer in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*inner, nn.Linear(width, OUT)).double()


def _batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    chosen = torch.Generator().manual_seed(100 * step + rank)
    x, y = (torch.randn(ROWS, size, generator=chosen, dtype=torch.float64) for size in (WIDTH, OUT))
    return x, y


def my_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    return _batch(RANK, step)


def whole_batch(step: int, ranks: Sequence[int] = ALL) -> tuple[torch.Tensor, torch.Tensor]:
    batches = [_batch(rank, step) for rank in ranks]
    return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def sgd(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """Adam would hide a gradient that is wrong by a factor."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int] = range(3)) -> None:
    """This rank's share of some steps."""
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, my_batch(step)).backward()
        optimizer.step()


def alone(model: nn.Module, make: Make = sgd, steps: Iterable[int] = range(3)) -> list[torch.Tensor]:
    """The parameters of one process after the same steps, all ranks' data in each."""
    model = copy.deepcopy(model)
    optimizer = make(model.parameters())
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, whole_batch(step)).backward()
        optimizer.step()
    return parameters_of(model)


def parameters_of(model: nn.Module) -> list[torch.Tensor]:
    """Whole, also those in shards. On every rank."""
    parameters = [parameter.detach() for parameter in model.parameters()]
    return [one.full_tensor() if hasattr(one, "full_tensor") else one.clone() for one in parameters]


def close(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], tolerance: float = 1e-9) -> None:
    assert len(found) == len(expected)
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.shape == other.shape
        gap = (one - other).abs().max().item()
        assert torch.allclose(one, other, rtol=tolerance, atol=tolerance), f"{number} of rank {RANK}: {gap} apart"
