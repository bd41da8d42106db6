"""A rank of a job whose ranks may each take a third of what a model, its gradients and the optimizer's state need.

    mpirun -np 4 python -m tests.overlap.optimizer.limited_job STRATEGY    as root, with control groups for memory

It prints what it has taken, in MB, or the error.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

import dear
import fsdp

WIDTH, LAYERS, SHARES = 1024, 96, 3
LIMIT = 16 * LAYERS * WIDTH * (WIDTH + 1) // SHARES  # bytes; fp32, and AdamW's two values


def parent() -> Path | None:
    """Where this process may make control groups; None where it cannot limit memory."""
    for folder, limit in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        place = folder / f"dear-test-{os.getpid()}"
        try:
            place.mkdir()
        except OSError:
            continue
        found = (place / limit).exists()
        place.rmdir()
        if found:
            return folder
    return None


def main() -> None:
    dear.init()
    x = torch.nn.Linear(4, 4)(torch.ones(1, 4)).sum()
    x.backward()  # what torch loads then is not the model's
    folder = parent()
    assert folder is not None
    place = folder / f"dear-test-{os.getpid()}"
    place.mkdir()
    try:
        first = folder.name == "memory"
        (place / "cgroup.procs").write_text(str(os.getpid()))
        (place / ("memory.limit_in_bytes" if first else "memory.max")).write_text(str(LIMIT))
        print(train(sys.argv[1]), flush=True)
        peak = int((place / ("memory.max_usage_in_bytes" if first else "memory.peak")).read_text())
        print(f"rank {dear.rank()} took {peak / 2**20:.0f} MB of {LIMIT / 2**20:.0f}", flush=True)
    finally:
        (folder / "cgroup.procs").write_text(str(os.getpid()))
        place.rmdir()


def train(strategy: str) -> str:
    with dear.deferred_init():
        model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters())
    if strategy == "fully_shard":
        for layer in model:
            fsdp.fully_shard(layer)
        fsdp.fully_shard(model)
    else:
        try:  # a bucket for each layer
            optimizer = dear.DistributedOptimizer(optimizer, model, strategy=strategy, threshold_mb=0)
        except MemoryError as error:
            return f"MemoryError: {error}"
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.ones(2, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
    return f"trained to {loss.item():.2e}"


if __name__ == "__main__":
    main()
