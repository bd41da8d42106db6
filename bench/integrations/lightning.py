"""One rank under Lightning's Trainer: with its own DDP, or with strategy="dear"."""

from __future__ import annotations

import os
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, DistributedSampler

from bench.integrations.task import LEARNING_RATE, Task, data, model

__all__ = ["main"]


class _Module(lightning.LightningModule):
    def __init__(self, task: Task) -> None:
        super().__init__()
        self.model, self.task, self.losses = model(), task, list[torch.Tensor]()

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        self.losses.append(loss.detach())
        return loss

    def on_train_start(self) -> None:
        self.task.begin()

    def on_train_batch_end(self, *_: Any) -> None:
        self.task.step_ended()

    def on_train_end(self) -> None:
        mine = torch.stack(self.losses)
        everybody: Any = self.all_gather(mine)
        losses = everybody.reshape(-1, len(mine)).mean(0)
        if self.trainer.is_global_zero:
            self.task.leave(losses.tolist())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), LEARNING_RATE)


def main() -> None:
    task = Task()
    examples: Any = data(task.steps, task.workers)
    if task.method == "dear":
        import dear.integrations.lightning

        dear.init()
    local = 1 if task.method == "none" else int(os.environ["LOCAL_WORLD_SIZE"])  # torchrun's, or dear.init()'s
    world = 1 if task.method == "none" else task.workers
    if task.method == "ddp" and "TORCHELASTIC_RUN_ID" not in os.environ:  # emulated hosts are told by RANK alone
        os.environ["NODE_RANK"] = str(int(os.environ["RANK"]) // local)
    strategy: Any = {"none": "auto", "dear": "dear", "ddp": DDPStrategy(**task.ddp)}[task.method]
    trainer = lightning.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=local,
        num_nodes=world // local,
        max_epochs=1,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    sampler: Any = DistributedSampler(examples, world, trainer.global_rank, shuffle=False)
    trainer.fit(_Module(task), DataLoader(examples, task.batch, sampler=sampler))


if __name__ == "__main__":
    main()
