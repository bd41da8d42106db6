"""fairscale's script for ShardedDDP and OSS; only the import is ours.

python examples/fairscale_sharded_ddp.py                               # mp.spawn starts two processes
torchrun --nproc-per-node 2 examples/fairscale_sharded_ddp.py
dearrun -np 2 python examples/fairscale_sharded_ddp.py
"""

from __future__ import annotations

import torch
from fairscale_job import device_of, dist_init, make_model, samples, start
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from oss import OSS
from oss import ShardedDataParallel as ShardedDDP


def train(rank: int, world_size: int, epochs: int) -> None:
    # process group init
    dist_init(rank, world_size)

    # Problem statement
    model = make_model().to(device_of(rank))
    dataset = TensorDataset(*samples(256))
    dataloader = DataLoader(dataset, batch_size=16, sampler=DistributedSampler(dataset, shuffle=False))
    loss_fn = torch.nn.CrossEntropyLoss()

    # optimizer specific arguments e.g. LR, momentum, etc...
    base_optimizer_arguments = {"lr": 1e-4}

    # Wrap a base optimizer into OSS
    base_optimizer = torch.optim.SGD  # any pytorch compliant optimizer
    optimizer = OSS(params=model.parameters(), optim=base_optimizer, **base_optimizer_arguments)

    # Wrap the model into ShardedDDP, which will reduce gradients to the proper ranks
    model = ShardedDDP(model, optimizer)

    # Any relevant training loop, nothing specific to OSS
    model.train()
    for epoch in range(epochs):
        total = 0.0
        for data, target in dataloader:
            data, target = data.to(device_of(rank)), target.to(device_of(rank))
            # Train
            model.zero_grad()
            outputs = model(data)
            loss = loss_fn(outputs, target)
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"rank {rank}: epoch {epoch}: loss {total / len(dataloader)!r}")


if __name__ == "__main__":
    start(train)
