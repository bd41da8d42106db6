"""What OSS and ShardedDDP cost and save beside a plain optimizer under DDP: images per second, peak memory, loss.

python examples/oss_benchmark.py                       # each method in new processes, one after the other
torchrun --nproc-per-node 2 examples/oss_benchmark.py --method oss_sharded_ddp
dearrun -np 2 python examples/oss_benchmark.py --method oss_ddp

Peak memory is a rank's: on a GPU what torch has allocated, else all that the process had in RAM, Python and torch included.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import resource
import time
from typing import Any

import fairscale_job
import torch
from fairscale_job import device_of, dist_init
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from oss import OSS, ShardedDDP

METHODS = ("vanilla", "oss_ddp", "oss_sharded_ddp")
CLASSES = 10


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare a plain optimizer under DDP with OSS and ShardedDDP.")
    parser.add_argument(
        "--method", choices=METHODS, help="one of them; default: all in turn, in processes of their own"
    )
    parser.add_argument(
        "--world-size", type=int, default=fairscale_job.WORLD_SIZE, help="processes to start; default 2"
    )
    parser.add_argument("--batch-size", type=int, default=16, help="images of each rank in a step")
    parser.add_argument("--steps", type=int, default=20, help="that are timed, after two others")
    parser.add_argument("--width", type=int, default=64, help="channels of the first convolution")
    parser.add_argument("--lr", type=float, default=1e-2)
    return parser.parse_args(argv)


def make_model(width: int) -> nn.Module:
    torch.manual_seed(0)
    sizes = [3, width, 2 * width, 4 * width]
    head = [nn.Flatten(), nn.Linear(sizes[-1] * 16, 8 * width), nn.ReLU(), nn.Linear(8 * width, CLASSES)]
    layers: list[nn.Module] = []
    for fewer, more in itertools.pairwise(sizes):
        layers += [nn.Conv2d(fewer, more, 3, stride=2, padding=1), nn.BatchNorm2d(more), nn.ReLU()]
    return nn.Sequential(*layers, *head)


def distribute(method: str, model: nn.Module, lr: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    options: dict[str, Any] = {"lr": lr, "momentum": 0.9}
    if method == "vanilla":
        return DistributedDataParallel(model), torch.optim.SGD(model.parameters(), **options)
    optimizer = OSS(params=model.parameters(), optim=torch.optim.SGD, **options)
    return (ShardedDDP(model, optimizer) if method == "oss_sharded_ddp" else DistributedDataParallel(model)), optimizer


def peak_mb(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def train(rank: int, world_size: int, _epochs: int, *, options: argparse.Namespace) -> None:
    dist_init(rank, world_size)
    device = device_of(rank)
    model, optimizer = distribute(options.method, make_model(options.width).to(device), options.lr)
    generator = torch.Generator().manual_seed(rank)
    labels = torch.arange(options.batch_size) % CLASSES
    images = torch.randn(options.batch_size, 3, 32, 32, generator=generator) + labels[:, None, None, None] / CLASSES
    images, labels = images.to(device), labels.to(device)
    loss_fn = nn.CrossEntropyLoss()
    started = time.perf_counter()
    for step in range(options.steps + 2):
        if step == 2:
            started = time.perf_counter()
        model.zero_grad()
        loss = loss_fn(model(images), labels)
        loss.backward()
        optimizer.step()
        last = loss.item()
    seconds = time.perf_counter() - started
    figures = torch.tensor([options.steps * options.batch_size / seconds, peak_mb(device), last], device=device)
    torch.distributed.all_reduce(figures)
    if rank == 0:
        images_per_second, memory, mean = figures.tolist()
        print(
            f"{options.method:<16} {images_per_second:8.1f} images/s   {memory / world_size:8.1f} MB peak   "
            f"loss {mean / world_size:.6f}",
            flush=True,
        )


def main(argv: list[str] | None = None) -> None:
    options = parse(argv)
    if "RANK" in os.environ and options.method is None:
        raise SystemExit(f"under torchrun and dearrun, choose one: --method {' | '.join(METHODS)}")
    fairscale_job.WORLD_SIZE = options.world_size
    for method in METHODS if options.method is None else (options.method,):
        one = argparse.Namespace(**vars(options) | {"method": method})
        fairscale_job.start(functools.partial(train, options=one))


if __name__ == "__main__":
    main()
