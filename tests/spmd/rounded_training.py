"""Training with parameters that travel in 16 bits, and one process that keeps exact ones beside those it computes with."""

from __future__ import annotations

from typing import Any

import torch

import dear
from tests.spmd.models import single_model
from tests.spmd.strategies import OPTIMIZERS
from tests.spmd.training import halves

__all__ = ["BF16", "Reference", "loss_of", "train_step"]

BF16 = torch.bfloat16


def loss_of(model: torch.nn.Module, step: int, rank: int) -> torch.Tensor:
    x, y = halves(step, rank)
    return torch.nn.functional.mse_loss(model(x), y)


class Reference:
    """One process: gradients narrowed, summed in fp32 in rank order, averaged, rounded; exact parameters updated."""

    def __init__(self, kind: str, dtype: torch.dtype, compressed: bool = True) -> None:
        self.model, self._dtype, self._compressed = single_model(), dtype, compressed
        self.exact = [torch.nn.Parameter(param.detach().clone()) for param in self.model.parameters()]
        self.optimizer = OPTIMIZERS[kind](self.exact)

    def _narrow(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.to(BF16).float() if self._compressed else gradient

    def step(self, number: int) -> None:
        parts = []
        for rank in range(dear.size()):
            self.model.zero_grad()
            loss_of(self.model, number, rank).backward()
            parts.append([self._narrow(param.grad) for param in self.model.parameters()])  # type: ignore[arg-type]
        for exact, *mine in zip(self.exact, *parts, strict=True):
            exact.grad = self._narrow(sum(mine[1:], mine[0]) * (1.0 / dear.size()))
        self.optimizer.step()
        self.round()

    @torch.no_grad()
    def round(self) -> None:
        for param, exact in zip(self.model.parameters(), self.exact, strict=True):
            param.copy_(exact.to(self._dtype))

    def check(self, model: torch.nn.Module, optimizer: Any) -> None:
        for mine, rounded in zip(model.parameters(), self.model.parameters(), strict=True):
            assert torch.equal(mine, rounded)
            assert mine.dtype is torch.float32
        saved = optimizer.state_dict()
        numbered = [exact for group in self.optimizer.param_groups for exact in group["params"]]
        for number, exact in enumerate(numbered):
            assert torch.equal(saved["master"][number], exact)
        expected = self.optimizer.state_dict()["state"]
        assert saved["state"].keys() == expected.keys()
        for number, state in expected.items():
            assert saved["state"][number].keys() == state.keys()
            assert all(torch.equal(saved["state"][number][key], value) for key, value in state.items())


def train_step(model: torch.nn.Module, optimizer: Any, number: int) -> None:
    optimizer.zero_grad()
    loss_of(model, number, dear.rank()).backward()
    optimizer.step()
