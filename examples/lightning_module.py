"""A LightningModule under Lightning's Trainer, on all workers of the job: only the strategy is dear's.

dearrun -np 2 python examples/lightning_module.py --devices 2
torchrun --nproc-per-node 2 examples/lightning_module.py --devices 2
python examples/lightning_module.py --devices 2                         # Lightning starts the second worker itself
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import dear.integrations.lightning  # noqa: F401  (registers strategy="dear")

WIDTH = 32


class AutoEncoder(lightning.LightningModule):
    def __init__(self, code: int = 4) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, code))
        self.decoder = nn.Sequential(nn.Linear(code, 24), nn.GELU(), nn.Linear(24, WIDTH))

    def forward(self, signals: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.encoder(signals))

    def training_step(self, batch: list[torch.Tensor], batch_index: int) -> torch.Tensor:
        return functional.mse_loss(self(batch[0]), batch[0])

    def validation_step(self, batch: list[torch.Tensor], batch_index: int) -> None:
        loss, power = functional.mse_loss(self(batch[0]), batch[0]), batch[0].square().mean()
        self.log_dict({"val_loss": loss, "val_power": power}, sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        found = ", ".join(f"{name} {value:.4f}" for name, value in self.trainer.callback_metrics.items())
        self.print(f"epoch {self.current_epoch + 1}: {found}")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def signals(count: int, seed: int) -> TensorDataset:
    """Sums of four waves: few numbers tell all of them."""
    generator = torch.Generator().manual_seed(seed)
    phases = torch.linspace(0, 6.283, WIDTH)
    waves = torch.stack([wave(phases * k) for wave in (torch.sin, torch.cos) for k in (1, 2)])
    return TensorDataset(torch.randn(count, 4, generator=generator) @ waves)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A LightningModule over dear")
    parser.add_argument("--strategy", default="dear", help="dear, dear_oss, dear_co2, …, or Lightning's own ddp")
    parser.add_argument("--devices", type=int, default=1, help="workers on each host: as many as the launcher started")
    parser.add_argument("--num-nodes", type=int, default=1, help="hosts")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--output-dir", help="checkpoints are written here")
    parser.add_argument("--resume", help="a checkpoint to go on from, of any strategy and number of workers")
    parser.add_argument(
        "--small", action="store_true", help="a few seconds: less data, fewer epochs unless they are given"
    )
    if parser.parse_args(argv).small:
        parser.set_defaults(epochs=5)  # what the command line gives counts
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> dict[str, float]:
    """The metrics of the last validation, over all workers."""
    options = arguments(argv)
    lightning.seed_everything(1, verbose=False)
    trainer = lightning.Trainer(
        strategy=options.strategy,
        accelerator="cpu",
        devices=options.devices,
        num_nodes=options.num_nodes,
        max_epochs=options.epochs,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        callbacks=[ModelCheckpoint(options.output_dir, save_last=True)] if options.output_dir else [],
        enable_checkpointing=options.output_dir is not None,
        enable_progress_bar=False,
        logger=False,
    )
    train, val = (
        DataLoader(signals(560 if options.small else 4096, seed=1), 16, shuffle=True),
        DataLoader(signals(128, seed=2), 16),
    )
    trainer.fit(AutoEncoder(), train, val, ckpt_path=options.resume)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


if __name__ == "__main__":
    main()
