"""A Horovod script that measures images per second on made-up data. Only the import is ours.

scripts/mpirun -np 2 .venv/bin/python examples/horovod_synthetic_benchmark.py --small
"""

from __future__ import annotations

import argparse
import statistics
import timeit

import torch
from horovod_imagenet import network
from torch.nn import functional

import dear as hvd


def log(text: str) -> None:
    if hvd.rank() == 0:
        print(text, flush=True)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Horovod's kind of synthetic benchmark")
    parser.add_argument("--fp16-allreduce", action="store_true", help="gradients travel in 16 bits")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--num-warmup-batches", type=int, default=5)
    parser.add_argument("--num-batches-per-iter", type=int, default=5)
    parser.add_argument("--num-iters", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="a second: a small network, and other defaults")
    if parser.parse_args(argv).small:  # what the command line gives counts
        parser.set_defaults(batch_size=2, num_warmup_batches=2, num_batches_per_iter=2, num_iters=2)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> float:
    args = arguments(argv)
    depths, width, side = ((1, 1), 4, 16) if args.small else ((3, 4, 6, 3), 32, 64)

    hvd.init()
    torch.manual_seed(42)
    model = network(depths, width, 1000)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())
    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compression, op=hvd.Average
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    data = torch.randn(args.batch_size, 3, side, side)
    target = torch.randint(1000, (args.batch_size,))

    losses = []

    def benchmark_step() -> None:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    log(
        f"{sum(p.numel() for p in model.parameters()):,} parameters, batch size {args.batch_size}, {hvd.size()} workers"
    )
    timeit.timeit(benchmark_step, number=args.num_warmup_batches)
    rates = []
    for index in range(args.num_iters):
        seconds = timeit.timeit(benchmark_step, number=args.num_batches_per_iter)
        rates.append(args.batch_size * args.num_batches_per_iter / seconds)
        log(f"iteration {index}: {rates[-1]:.1f} images/s per worker")
    mean, spread = statistics.mean(rates), 1.96 * statistics.pstdev(rates)
    log(f"images/s per worker: {mean:.1f} +- {spread:.1f}")
    log(f"after {len(losses)} batches: loss {losses[-1]:.4f}")
    log(f"images/s of {hvd.size()} worker(s): {hvd.size() * mean:.1f} +- {hvd.size() * spread:.1f}")
    return mean


if __name__ == "__main__":
    main()
