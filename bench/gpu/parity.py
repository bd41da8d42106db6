"""Checks on a device that every strategy equals one process on the whole batch; for 1 or 2 ranks.

With ``--device cpu`` the same on the CPU. ``--trace FILE`` has rank 0 write a trace of `dear`, streams included.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch

import co2
import dear
import fsdp
import mgwfbp
import osdp
import oss
import wfbp
from bench.gpu.streams import read, streams_of

__all__ = ["STRATEGIES", "largest_difference", "main"]

STRATEGIES: dict[str, Callable[..., Any]] = {
    "dear": lambda o, m: dear.DistributedOptimizer(o, m, threshold_mb=0.01),
    "dear-rb": lambda o, m: dear.DistributedOptimizer(o, m, threshold_mb=0.01, policy="rb"),
    "dear-eager": lambda o, m: dear.DistributedOptimizer(o, m, threshold_mb=0.01, eager=True),
    "oss": lambda o, m: oss.DistributedOptimizer(o, m, threshold_mb=0.01),
    "fsdp": lambda o, m: fsdp.DistributedOptimizer(o, m, threshold_mb=0.01),
    "fsdp-offload": lambda o, m: fsdp.DistributedOptimizer(o, m, threshold_mb=0.01, offload="cpu"),
    "osdp": lambda o, m: osdp.DistributedOptimizer(o, m, threshold_mb=0.01),
    "wfbp": wfbp.DistributedOptimizer,
    "co2-localsgd": lambda o, m: co2.DistributedOptimizer(
        o, m, outer="localsgd", outer_frequency=2, nprocs_per_node=dear.size()
    ),
    "co2-acco": lambda o, m: co2.DistributedOptimizer(o, m, outer="acco", warmup_steps=_STEPS),
    "mgwfbp": lambda o, m: mgwfbp.DistributedOptimizer(o, m, alpha_beta=(3e-5, 1e-9), profile_steps=2),
}
_STEPS = 6
_BATCH = 8
# Matrix products may be cut otherwise for other batch sizes.
_TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5}


def _model(device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(3)
    layers = [
        torch.nn.Linear(16, 96),
        torch.nn.Tanh(),
        torch.nn.Linear(96, 96),
        torch.nn.Tanh(),
        torch.nn.Linear(96, 4),
    ]
    return torch.nn.Sequential(*layers).to(device, dtype)


def _train(model: torch.nn.Module, optimizer: Any, rank: int, size: int) -> list[torch.Tensor]:
    """`rank`'s part of `size` of each batch, which has the same samples for any number of ranks."""
    first = next(model.parameters())
    generator = torch.Generator().manual_seed(5)
    for _ in range(_STEPS):
        inputs = torch.randn(_BATCH * 2, 16, generator=generator, dtype=torch.float64)
        mine = inputs.chunk(size)[rank].to(first.device, first.dtype)
        optimizer.zero_grad()
        model(mine).square().mean().backward()
        optimizer.step()
    return [value.double().cpu() for value in model.state_dict().values()]  # whole ones, where ranks have shares


def largest_difference(strategy: str, device: torch.device, dtype: torch.dtype) -> float:
    """The largest difference between parameters trained with `strategy` by all ranks and by one process.

    After ``init()``, on every rank.
    """
    alone, shared = _model(device, dtype), _model(device, dtype)
    expected = _train(alone, torch.optim.AdamW(alone.parameters(), lr=1e-2), 0, 1)
    wrapped = STRATEGIES[strategy](torch.optim.AdamW(shared.parameters(), lr=1e-2), shared)
    found = _train(shared, wrapped, dear.rank(), dear.size())
    return max(float((one - other).abs().max()) for one, other in zip(expected, found, strict=True))


def _trace(device: torch.device, file: str) -> None:
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    model = _model(device, torch.float32)
    optimizer = STRATEGIES["dear"](torch.optim.AdamW(model.parameters(), lr=1e-2), model)
    _train(model, optimizer, dear.rank(), dear.size())
    with torch.profiler.profile(activities=kinds) as seen:
        _train(model, optimizer, dear.rank(), dear.size())
    if dear.rank() == 0:
        seen.export_chrome_trace(file)
        for stream in streams_of(read(file)):
            print(f"stream {stream.number}: {stream.operations} operations, {stream.busy_ms:.2f} ms, {stream.examples}")


def main(arguments: list[str] | None = None) -> int:
    """Run all strategies; returns 0 where each is within the tolerance of its type, on this rank."""
    parser = argparse.ArgumentParser(prog="bench.gpu.parity", description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--trace", metavar="FILE")
    chosen = parser.parse_args(arguments)
    dear.init()
    device = torch.device(chosen.device)
    if device.type == "cuda":
        torch.cuda.set_device(dear.local_rank() % torch.cuda.device_count())
        device = torch.device("cuda", torch.cuda.current_device())
    failed = 0
    for dtype, tolerance in _TOLERANCE.items():
        for strategy in STRATEGIES:
            difference = largest_difference(strategy, device, dtype)
            good = difference <= tolerance
            failed += not good
            if dear.rank() == 0 or not good:
                verdict = "ok" if good else f"above {tolerance:g} on rank {dear.rank()}"
                print(
                    f"{strategy:12} {dtype} on {device}, {dear.size()} rank(s): {difference:.3g} {verdict}", flush=True
                )
    if chosen.trace is not None:
        _trace(device, chosen.trace)
    dear.shutdown()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
