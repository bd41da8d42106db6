"""Handwritten digits as fairscale-CO2's README trains: a plain optimizer, and perform_co2().

A script of fairscale-CO2 changes in its import, and calls average_parameters() before it evaluates or saves. co2.init() is
for co2.rank() and co2.size(): the class calls it where a script has not.

On one host all ranks (up to 8) are one group, which averages gradients in every step: pass nprocs_per_node=1 to
CO2DistributedDataParallel to see local steps.

.venv/bin/torchrun --nproc-per-node 2 examples/co2_mnist.py
.venv/bin/dearrun -np 2 .venv/bin/python examples/co2_mnist.py         # over MPI; also scripts/mpirun -np 2
.venv/bin/torchrun --nproc-per-node 2 examples/co2_mnist.py --ddp      # the same with DistributedDataParallel
"""

from __future__ import annotations

import argparse
from typing import Any

import mnist_data
import torch
from mnist import Net
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import co2
from co2 import CO2DistributedDataParallel


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Handwritten digits with fairscale-CO2's loop")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=16, help="samples per step of each worker")
    parser.add_argument("--ddp", action="store_true", help="gradients are averaged in every step")
    parser.add_argument("--small", action="store_true", help="seconds: fewer epochs")
    if parser.parse_args(argv).small:  # what the command line gives counts
        parser.set_defaults(epochs=4)
    return parser.parse_args(argv)


def wrapped(model: torch.nn.Module, use_co2: bool) -> Any:
    if use_co2:  # in groups of 8 ranks, or of as many as a host has
        return CO2DistributedDataParallel(model, outer_momentum=0.2, nprocs_per_node=8)
    return DDP(model)


def train(
    rank: int, world_size: int, args: argparse.Namespace, digits: mnist_data.Digits, use_co2: bool
) -> tuple[torch.nn.Module, torch.Tensor]:
    dataset = TensorDataset(digits.train_images, digits.train_labels)
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, world_size, rank, drop_last=True)
    dataloader = DataLoader(dataset, args.batch_size, sampler=sampler, drop_last=True)
    loss_fn = torch.nn.CrossEntropyLoss()

    model = wrapped(Net(side=digits.train_images.shape[-1]), use_co2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    model.train()
    for e in range(args.epochs):
        sampler.set_epoch(e)
        for data, target in dataloader:
            outputs = model(data)
            loss = loss_fn(outputs, target)
            loss.backward()
            optimizer.step()
            model.zero_grad(set_to_none=use_co2)
            if use_co2:  # every third call ends a round
                model.perform_co2(optimizer)

    if use_co2:  # one model on all ranks, to be evaluated or saved
        model.average_parameters()
    return model, loss.detach()


def main(argv: list[str] | None = None) -> float:
    args = arguments(argv)
    co2.init()
    torch.manual_seed(1 + co2.rank())
    digits = mnist_data.embedded()
    model, loss = train(co2.rank(), co2.size(), args, digits, use_co2=not args.ddp)
    model.eval()
    with torch.no_grad():
        accuracy = (model(digits.test_images).argmax(1) == digits.test_labels).float().mean().item()
    mean = co2.allreduce(loss)
    if co2.rank() == 0:
        print(f"loss {mean:.4f}, test accuracy {100 * accuracy:.2f} %", flush=True)
    return accuracy


if __name__ == "__main__":
    main()
