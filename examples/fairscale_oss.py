"""fairscale's minimal script for OSS; only the import is ours. Nothing reduces gradients: each owner trains on its own.

python examples/fairscale_oss.py                                       # mp.spawn starts two processes
torchrun --nproc-per-node 2 examples/fairscale_oss.py
dearrun -np 2 python examples/fairscale_oss.py
"""

from __future__ import annotations

import torch
from fairscale_job import device_of, dist_init, make_model, samples, start
from torch.utils.data import DataLoader, DistributedSampler

from oss import OSS


def train(rank: int, world_size: int, epochs: int) -> None:
    # DDP
    dist_init(rank, world_size)

    # Problem statement
    model = make_model().to(device_of(rank))
    dataset = [{"inputs": data, "label": label} for data, label in zip(*samples(256), strict=True)]
    dataloader = DataLoader(dataset, batch_size=16, sampler=DistributedSampler(dataset, shuffle=False))
    loss_fn = torch.nn.CrossEntropyLoss()
    base_optimizer = torch.optim.SGD  # pick any pytorch compliant optimizer here
    base_optimizer_arguments = {"lr": 1e-4}

    optimizer = OSS(params=model.parameters(), optim=base_optimizer, **base_optimizer_arguments)

    # Any relevant training loop, nothing specific to OSS
    model.train()
    for epoch in range(epochs):
        total = 0.0
        for batch in dataloader:
            # Train
            model.zero_grad()
            outputs = model(batch["inputs"].to(device_of(rank)))
            loss = loss_fn(outputs, batch["label"].to(device_of(rank)))
            torch.distributed.all_reduce(loss, op=torch.distributed.ReduceOp.SUM)
            loss /= world_size
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"rank {rank}: epoch {epoch}: loss {total / len(dataloader)!r}")


if __name__ == "__main__":
    start(train)
