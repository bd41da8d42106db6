"""One rank of a job that trains with PowerSGD in buckets: ``-m tests.bench.powersgd SPEC several``, or ``one``."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bench.methods import ddp
from bench.methods.registry import method


def main(spec: str, several: bool) -> None:
    chosen = method(spec)
    place = chosen.join(torch.device("cpu"))
    used: dict[int, Any] = {}
    hook = ddp.powerSGD_hook

    def noted(state: Any, bucket: Any) -> Any:
        assert used.setdefault(bucket.index(), state.process_group) is state.process_group
        return hook(state, bucket)

    ddp.powerSGD_hook = noted  # type: ignore[assignment]
    torch.manual_seed(1)
    plain = nn.Sequential(*(nn.Linear(64, 64) for _ in range(5)))
    model, optimizer = chosen.distribute(plain, (torch.optim.SGD, {"lr": 0.01}))
    torch.manual_seed(place.rank)
    inputs = torch.randn(4, 64)
    for _ in range(20):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    assert (len(used) > 1) == several, used
    assert len(set(used.values())) == len(used), used  # a group for each
    mine = torch.cat([parameter.detach().flatten() for parameter in plain.parameters()])
    everybody = [torch.empty_like(mine) for _ in range(place.size)]
    dist.all_gather(everybody, mine)
    assert all(torch.equal(mine, other) for other in everybody)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # groups that end with their last user may wait for the interpreter, which waits for them


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] == "several")
