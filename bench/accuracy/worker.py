"""One rank of a time-to-accuracy run: trains, and writes its losses, when each step ended, and what was learned."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from bench.accuracy.ranks import DIVERGED, bits, file_of
from bench.accuracy.tasks import TASKS
from bench.methods.registry import method
from overlap.features.nonfinite import NonfiniteGradient

__all__ = ["main", "train"]


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[], torch.Tensor],
    steps: int,
    passes: int = 1,
    schedule: Callable[[int, int], float] | None = None,
) -> tuple[list[float], list[float]]:
    """The losses of as many batches, and the seconds until each was done with.

    After every `passes` of them, and after the last, the optimizer makes a step with the mean of their gradients.
    `schedule`: of a batch and how many there are, the part of the learning rate that a step takes which begins with it.
    """
    scheduler = None
    if schedule is not None:
        scheduler = LambdaLR(optimizer, lambda made: schedule(made * passes, steps))
    losses, ended, begun = [], [], time.perf_counter()
    for first in range(0, steps, passes):
        optimizer.zero_grad()
        window = min(passes, steps - first)
        for number in range(1, window + 1):
            loss = loss_of()
            (loss / window).backward()  # type: ignore[no-untyped-call]
            if number == window:
                optimizer.step()
                if scheduler is not None:
                    scheduler.step()
            losses.append(loss.item())
            ended.append(time.perf_counter() - begun)
    return losses, ended


def main() -> None:
    """Arguments: a JSON object with method, task, steps, seed, rate and output."""
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    task, chosen = TASKS[settings["task"]], method(settings["method"])
    place = chosen.join(torch.device("cpu"))
    seed, output = settings["seed"], file_of(Path(settings["output"]), place.rank)
    torch.manual_seed(seed)
    bare = task.build()
    model, optimizer = chosen.distribute(bare, (task.optimizer, {**task.arguments, "lr": settings["rate"]}))
    loss_of, generator = task.loss(), torch.Generator().manual_seed(1000 * seed + place.rank)
    try:
        losses, ended = train(
            model, optimizer, lambda: loss_of(model, generator), settings["steps"], chosen.passes, task.schedule
        )
        chosen.settle(optimizer)
        chosen.average(optimizer)
    except NonfiniteGradient as error:  # which ends the job, and is told from other failures by this
        output.write_text(json.dumps({DIVERGED: str(error)}))
        raise
    run: dict[str, Any] = {"seed": seed, "rate": settings["rate"], "loss": losses}
    run["seconds"] = [round(seconds, 3) for seconds in ended]
    run["bits"] = {"loss": bits(losses), "parameters": chosen.digest(bare)}
    if task.held_out is not None:
        bare.eval()
        with torch.no_grad():
            run["held_out"] = task.held_out(bare)
    chosen.leave()
    output.write_text(json.dumps(run))


if __name__ == "__main__":
    main()
