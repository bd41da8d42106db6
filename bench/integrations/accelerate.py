"""One rank of a loop over Accelerate: its own Accelerator, which puts DDP around the model, or dear's."""

from __future__ import annotations

from typing import Any

import accelerate
import torch

from bench.integrations.task import LEARNING_RATE, Task, data, model

__all__ = ["main"]


def main() -> None:
    task = Task()
    kind: Any = accelerate.Accelerator
    handlers = [accelerate.DistributedDataParallelKwargs(**task.ddp)] if task.ddp else []
    if task.method == "dear":
        from dear.integrations.accelerate import Accelerator

        kind = Accelerator
    accelerator = kind(cpu=True, kwargs_handlers=handlers)
    plain = model()
    optimizer: Any = torch.optim.AdamW(plain.parameters(), LEARNING_RATE)
    loader: Any = torch.utils.data.DataLoader(data(task.steps, task.workers), batch_size=task.batch)  # type: ignore[arg-type]
    trained, optimizer, loader = accelerator.prepare(plain, optimizer, loader)
    losses = []
    task.begin()
    for batch in loader:
        optimizer.zero_grad()
        loss = trained(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(trained.parameters(), 1.0)
        optimizer.step()
        losses.append(accelerator.gather(loss.detach()[None]).mean().item())
        task.step_ended()
    if accelerator.is_main_process:
        task.leave(losses)
    accelerator.end_training()


if __name__ == "__main__":
    main()
