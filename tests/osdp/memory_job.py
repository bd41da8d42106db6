"""A rank that trains under a memory limit, and prints what Linux says it took in each step: see test_memory.py.

In every fifth step the last rank is late in the middle of backward.

mpirun -np 2 python -m tests.osdp.memory_job LIMIT_GB
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch

import osdp
from overlap.job.memory.counted import Peak

WIDTH, LAYERS, STEPS = 1024, 24, 22
LATE = 1.5  # seconds


def main() -> None:
    osdp.init()
    torch.set_num_threads(1)
    torch.manual_seed(osdp.rank())
    layers = [part for _ in range(LAYERS) for part in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())]
    model = torch.nn.Sequential(*layers)
    inner = torch.optim.AdamW(model.parameters(), 1e-4)
    optimizer = osdp.DistributedOptimizer(inner, model, memory_limit_gb=float(sys.argv[1]), poison=False)
    watching = optimizer._planned
    found: list[tuple[bool, int]] = []
    freed = 0
    late = [False]

    def comes_late(*_: Any) -> None:
        if late[0] and osdp.rank() == osdp.size() - 1:
            time.sleep(LATE)

    layers[LAYERS].register_full_backward_pre_hook(comes_late)
    real = Peak.read
    most = [0]

    def read(peak: Peak) -> int:
        now = real(peak)
        most[0] = max(most[0], now)
        return now

    Peak.read = read  # type: ignore[method-assign]  # who looks makes the kernel begin anew
    x = torch.randn(16, WIDTH)
    for step in range(STEPS):
        most[0], late[0] = 0, step % 5 == 4
        settled = not watching.under_way
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        found.append((settled, most[0]))
        if watching.plan is not None and not freed:
            freed = watching.plan.in_passes  # as it was measured while all were freed
    plan = watching.plan
    every = osdp.allgather_object(found)
    if osdp.rank() == 0:
        print(optimizer.explain(), file=sys.stderr)
        facts = {"steps": every, "limit": plan.limit, "predicted": plan.predicted_bytes, "kept": len(plan.kept)}
        print(json.dumps({**facts, "freed": freed, "more": plan.more}))


if __name__ == "__main__":
    main()
