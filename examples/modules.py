"""Lightning's way to write a training: a module that knows its steps and optimizers, and a runner that knows dear.

scripts/mpirun -np 2 .venv/bin/python examples/modules.py
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import dear


class TrainingModule(nn.Module):
    """What a user of :class:`Runner` writes."""

    def training_step(self, batch: torch.Tensor, batch_index: int) -> torch.Tensor:
        raise NotImplementedError

    def validation_step(self, batch: torch.Tensor, batch_index: int) -> dict[str, torch.Tensor]:
        raise NotImplementedError

    def configure_optimizers(self) -> tuple[torch.optim.Optimizer, Any]:
        """The optimizer, and its scheduler (stepped after every epoch) or None."""
        raise NotImplementedError


@dataclass
class Runner:
    """Fits a module on all workers of the job; loaders give each worker its own batches."""

    max_epochs: int
    accumulate_grad_batches: int = 1
    gradient_clip_val: float | None = None

    def fit(
        self, module: TrainingModule, train: Iterable[torch.Tensor], val: Iterable[torch.Tensor]
    ) -> dict[str, float]:
        """Returns the metrics of the last validation, averaged over workers."""
        inner, scheduler = module.configure_optimizers()
        optimizer = dear.DistributedOptimizer(inner, module, backward_passes_per_step=self.accumulate_grad_batches)
        metrics: dict[str, float] = {}
        for epoch in range(self.max_epochs):
            self._train_epoch(module, optimizer, list(train))
            if scheduler is not None:  # built on the user's own optimizer, before it was wrapped
                scheduler.step()
            metrics = self._validate(module, val)
            if dear.rank() == 0:
                told = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
                print(f"epoch {epoch + 1}/{self.max_epochs}: {told}", flush=True)
        return metrics

    def _train_epoch(self, module: TrainingModule, optimizer: Any, batches: list[torch.Tensor]) -> None:
        module.train()
        many = self.accumulate_grad_batches
        for first in range(0, len(batches), many):
            window = batches[first : first + many]
            optimizer.zero_grad()
            for index, batch in enumerate(window, first):
                (module.training_step(batch, index) / len(window)).backward()
            if self.gradient_clip_val is not None:
                optimizer.clip_grad_norm_(self.gradient_clip_val)
            optimizer.step()

    @torch.no_grad()
    def _validate(self, module: TrainingModule, batches: Iterable[torch.Tensor]) -> dict[str, float]:
        module.eval()
        seen = [module.validation_step(batch, index) for index, batch in enumerate(batches)]
        return {name: float(dear.allreduce(torch.stack([one[name] for one in seen]).mean())) for name in seen[0]}


class AutoEncoder(TrainingModule):
    def __init__(self, width: int = 32, code: int = 4) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(width, 24), nn.GELU(), nn.Linear(24, code))
        self.decoder = nn.Sequential(nn.Linear(code, 24), nn.GELU(), nn.Linear(24, width))

    def training_step(self, batch: torch.Tensor, batch_index: int) -> torch.Tensor:
        return functional.mse_loss(self.decoder(self.encoder(batch)), batch)

    def validation_step(self, batch: torch.Tensor, batch_index: int) -> dict[str, torch.Tensor]:
        return {"val_loss": self.training_step(batch, batch_index), "val_power": batch.square().mean()}

    def configure_optimizers(self) -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def signals(count: int, width: int, seed: int) -> torch.Tensor:
    """Sums of four waves: few numbers tell all of them."""
    generator = torch.Generator().manual_seed(seed)
    phases = torch.linspace(0, 6.283, width)
    waves = torch.stack([torch.sin(phases * k) for k in (1, 2)] + [torch.cos(phases * k) for k in (1, 2)])
    return torch.randn(count, 4, generator=generator) @ waves


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A Lightning-style loop over dear")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument(
        "--small", action="store_true", help="a few seconds: less data, fewer epochs unless they are given"
    )
    if parser.parse_args(argv).small:
        parser.set_defaults(epochs=5)  # what the command line gives counts
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> dict[str, float]:
    options = arguments(argv)
    dear.init()
    torch.manual_seed(dear.rank())  # the wrapper brings rank 0's values
    count, batch = (560, 16) if options.small else (4096, 32)
    mine = slice(dear.rank(), None, dear.size())
    per_rank = count // dear.size()
    train = signals(count, 32, seed=1)[mine][:per_rank].split(batch)  # as many batches on every worker
    val = signals(128, 32, seed=2)[mine].split(batch)
    runner = Runner(max_epochs=options.epochs, accumulate_grad_batches=2, gradient_clip_val=1.0)
    return runner.fit(AutoEncoder(), train, val)


if __name__ == "__main__":
    main()
