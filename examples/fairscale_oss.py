"""fairscale's minimal script for OSS; only the import is ours. Nothing reduces gradients: each owner trains on its own.

python examples/fairscale_oss.py                                       # mp.spawn starts two processes
torchrun --nproc-per-node 2 examples/fairscale_oss.py
dearrun -np 2 python examples/fairscale_oss.py
"""

from __future__ import annotations

import os
import socket

import torch
import torch.multiprocessing as mp
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from oss import OSS

WORLD_SIZE = 2
EPOCHS = 3


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Inputs, and whether their sum is positive."""

    def __init__(self, number: int) -> None:
        self.inputs = torch.randn(number, 16, generator=torch.Generator().manual_seed(0))
        self.labels = (self.inputs.sum(1) > 0).long()

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"inputs": self.inputs[index], "label": self.labels[index]}


def dist_init(rank: int, world_size: int) -> None:
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    torch.distributed.init_process_group(backend, rank=rank, world_size=world_size)


def train(rank: int, world_size: int, epochs: int) -> None:
    # DDP
    dist_init(rank, world_size)
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")

    # Problem statement
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2)).to(device)
    samples = Samples(256)
    dataloader = DataLoader(samples, batch_size=16, sampler=DistributedSampler(samples, shuffle=False))
    loss_fn = nn.CrossEntropyLoss()
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
            outputs = model(batch["inputs"].to(device))
            loss = loss_fn(outputs, batch["label"].to(device))
            torch.distributed.all_reduce(loss, op=torch.distributed.ReduceOp.SUM)
            loss /= world_size
            loss.backward()
            optimizer.step()
            total += loss.item()
        if rank == 0:
            print(f"epoch {epoch}: loss {total / len(dataloader)!r}")

    torch.distributed.destroy_process_group()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


if __name__ == "__main__":
    if "RANK" in os.environ:  # torchrun and dearrun have started this process
        train(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), EPOCHS)
    else:
        os.environ["MASTER_PORT"] = str(free_port())
        mp.spawn(train, args=(WORLD_SIZE, EPOCHS), nprocs=WORLD_SIZE, join=True)
