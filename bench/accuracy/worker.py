"""One rank of a time-to-accuracy run: trains, and on rank 0 writes when each step ended and what its loss was."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from bench.accuracy.tasks import TASKS
from bench.methods.registry import method

__all__ = ["main"]


def main() -> None:
    """Arguments: a JSON object with method, task, steps, seed and output."""
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    task, chosen = TASKS[settings["task"]], method(settings["method"])
    place = chosen.join(torch.device("cpu"))
    seed = settings["seed"]
    torch.manual_seed(seed)
    bare = task.build()
    model, optimizer = chosen.distribute(bare, (task.optimizer, task.arguments))
    scheduler = None
    if (schedule := task.schedule) is not None:
        scheduler = LambdaLR(optimizer, lambda step: schedule(step, settings["steps"]))
    loss_of, generator = task.loss(), torch.Generator().manual_seed(1000 * seed + place.rank)
    losses, ended, begun = [], [], time.perf_counter()
    for _ in range(settings["steps"]):
        optimizer.zero_grad()
        loss = loss_of(model, generator)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
        ended.append(time.perf_counter() - begun)
    chosen.settle(optimizer)
    chosen.average(optimizer)
    run: dict[str, Any] = {"seed": seed, "loss": list(losses)}
    run["seconds"] = [round(seconds, 3) for seconds in ended]
    if task.held_out is not None:
        bare.eval()
        with torch.no_grad():
            run["held_out"] = task.held_out(bare)
    chosen.leave()
    if place.rank == 0:
        Path(settings["output"]).write_text(json.dumps(run))


if __name__ == "__main__":
    main()
