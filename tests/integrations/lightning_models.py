"""What the tests of Lightning train: small modules, and a Trainer without output."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import dear
from dear.integrations.lightning import DearEnvironment

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")
warnings.filterwarnings("ignore", message=".*TreeSpec|.*does not have many workers|.*sync_dist")

ROWS, WIDTH = 64, 8


def ddp(**options: Any) -> DDPStrategy:
    """Lightning's own, with the ranks of this job's launcher."""
    environment = None if "TORCHELASTIC_RUN_ID" in os.environ else DearEnvironment()
    return DDPStrategy(cluster_environment=environment, **options)


def data(dtype: torch.dtype = torch.float64) -> TensorDataset:
    inputs = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return TensorDataset(inputs.to(dtype), inputs.sum(1, keepdim=True).sin().to(dtype))


def loader(batch: int = 4, dtype: torch.dtype = torch.float64, *, whole: bool = False) -> DataLoader[Any]:
    """Of this rank's part in order; `whole`, of the batches of all ranks, as one process would see them."""
    if whole:
        return DataLoader(data(dtype), batch * dear.size())
    return DataLoader(data(dtype), batch, sampler=DistributedSampler(data(), dear.size(), dear.rank(), shuffle=False))


class Regression(lightning.LightningModule):
    """Keeps in `seen` what a user would print."""

    def __init__(self, optimizer: Callable[..., Any] = torch.optim.AdamW, **options: Any) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(WIDTH, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        self.optimizer, self.options = optimizer, {"lr": 1e-2, **options}
        self.seen: list[Any] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.net(inputs)

    def training_step(self, batch: Any, batch_index: int) -> torch.Tensor:
        loss = functional.mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.seen.append(("loss", self.trainer.callback_metrics["loss"].item()))

    def validation_step(self, batch: Any, batch_index: int) -> None:
        self.log("val", functional.mse_loss(self(batch[0]), batch[1]), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.seen.append(("val", self.trainer.callback_metrics["val"].item()))

    def test_step(self, batch: Any, batch_index: int) -> None:
        self.log("test", functional.l1_loss(self(batch[0]), batch[1]), sync_dist=True)

    def predict_step(self, batch: Any, batch_index: int) -> torch.Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self.parameters(), **self.options)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def trainer(strategy: Any, **options: Any) -> lightning.Trainer:
    """Of all ranks; with ``strategy="one"``, of one process on each."""
    one = strategy == "one"
    plain = {
        "accelerator": "cpu",
        "devices": 1 if one else dear.local_size(),
        "max_epochs": 3,
        "precision": "64-true",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": False,
    }
    return lightning.Trainer(strategy="auto" if one else strategy, **{**plain, **options})


def fit(strategy: Any, make: Callable[[], Regression] = Regression, dtype: Any = torch.float64, **options: Any) -> Any:
    """The module that was trained, and its Trainer; every rank begins with other parameters, unless it is one process."""
    whole = strategy == "one"
    ckpt_path = options.pop("ckpt_path", None)
    lightning.seed_everything(0 if whole else dear.rank(), verbose=False)
    module, runner = make(), trainer(strategy, **options)
    runner.fit(module, loader(dtype=dtype, whole=whole), loader(dtype=dtype, whole=whole), ckpt_path=ckpt_path)
    return module, runner


def assert_same(one: Any, other: Any, tolerance: float = 0.0) -> None:
    """Parameters and buffers, bit for bit or to a relative tolerance."""
    mine, theirs = one.state_dict(), other.state_dict()
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        torch.testing.assert_close(
            value, theirs[name], rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )
