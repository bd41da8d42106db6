"""How long an all-reduce takes here: measured on the ranks and the network there are."""

from __future__ import annotations

import statistics
import time

import torch

from overlap.communicator import Communicator
from overlap.objects import agree

__all__ = ["measure_all_reduce"]

_SIZES = tuple(4096 * 4**power for power in range(6))  # 4 KB to 4 MB
_STREAM = (
    2**21
)  # bytes sent without a pause where 16 operations come to as much: what buffers on the way hide is little
_MOST = 16  # operations in flight
_FEWEST = 3  # sizes that are measured whatever it takes; a fit needs two


def measure_all_reduce(
    comm: Communicator, *, budget_seconds: float = 1.0, warmup: int = 1, repeats: int = 5
) -> list[tuple[int, float]]:
    """(bytes, seconds) of an all-reduce that follows others, as in backward; the median of `repeats`, rank 0's clock.

    On every rank, with nothing else in flight. Returns the same on all. Larger sizes are left out once
    `budget_seconds` are spent.
    """
    samples: list[tuple[int, float]] = []
    spent = 0.0
    for number, nbytes in enumerate(_SIZES):
        count = min(max(_STREAM // nbytes, 1), _MOST)
        values = [torch.zeros(nbytes // 4, dtype=torch.float32) for _ in range(count)]
        times = []
        for repeat in range(warmup + repeats):
            comm.barrier(label="probe")
            begin = time.perf_counter()
            for work in [comm.all_reduce_async(one, one, label="probe") for one in values]:
                work.wait()
            seconds = time.perf_counter() - begin
            spent += seconds
            if repeat >= warmup:
                times.append(seconds / count)
        samples.append((nbytes, statistics.median(times)))
        if agree(comm, number + 1 >= _FEWEST and spent > budget_seconds):
            break
    return agree(comm, samples)
