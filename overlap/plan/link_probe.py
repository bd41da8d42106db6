"""Measures how long an all-reduce takes on these ranks and their network."""

from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from overlap.plan.cost_model import CostModel, fit
from overlap.transport.communicator import Communicator
from overlap.transport.objects import agree
from overlap.transport.operation import all_reduce, barrier

__all__ = ["Measured", "link_cost", "measure_all_reduce", "start_cost"]

_SIZES = tuple(4096 * 4**power for power in range(6))  # 4 KB to 4 MB
_STREAM = (
    2**21
)  # bytes sent without a pause where 16 operations come to as much: what buffers on the way hide is little
_MOST = 16  # operations in flight
_FEWEST = 3  # sizes that are measured whatever it takes; a fit needs two


@dataclass(frozen=True, slots=True)
class Measured:
    """Measured all-reduces that follow others, as in backward: medians by rank 0's clocks."""

    samples: list[tuple[int, float]]  # (bytes, wall seconds of one)
    handling: float  # processor seconds that one costs the thread that issues it and waits for it


def measure_all_reduce(
    comm: Communicator,
    *,
    budget_seconds: float = 1.0,
    warmup: int = 1,
    repeats: int = 5,
    sizes: Sequence[int] = _SIZES,
) -> Measured:
    """Time all-reduces of `sizes` (bytes, ascending), each `repeats` times.

    On every rank, with nothing else in flight; of tensors at ``comm.place``. Returns the same on all. Larger sizes are
    left out once `budget_seconds` are spent.
    """
    samples: list[tuple[int, float]] = []
    handling = 0.0
    spent = 0.0
    for number, nbytes in enumerate(sizes):
        count = min(max(_STREAM // nbytes, 1), _MOST)
        values = [torch.zeros(nbytes // 4, dtype=torch.float32, device=comm.place) for _ in range(count)]
        times, own_times = [], []
        for repeat in range(warmup + repeats):
            comm.run(barrier(label="probe"))
            begin, own = time.perf_counter(), time.thread_time()
            for work in [comm.start(all_reduce(one, one, label="probe")) for one in values]:
                work.wait()
            seconds, own = time.perf_counter() - begin, time.thread_time() - own
            spent += seconds
            if repeat >= warmup:
                times.append(seconds / count)
                own_times.append(own / count)
        if number == 0:  # the one with the most operations and the fewest bytes
            handling = statistics.median(own_times)
        samples.append((nbytes, statistics.median(times)))
        if agree(comm, number + 1 >= _FEWEST and spent > budget_seconds):
            break
    return agree(comm, Measured(samples, handling))


_starts: weakref.WeakKeyDictionary[Communicator, tuple[float, float]] = weakref.WeakKeyDictionary()


def start_cost(comm: Communicator) -> tuple[float, float]:
    """Seconds that an all-reduce of any size takes while others are in flight, and seconds of the issuing thread.

    The same on every rank of `comm`. The first use measures it with a few small ones, on every rank.
    """
    if comm not in _starts:
        measured = measure_all_reduce(comm, repeats=3, sizes=_SIZES[:1])
        _starts[comm] = measured.samples[0][1], measured.handling
    return _starts[comm]


_costs: weakref.WeakKeyDictionary[Communicator, CostModel] = weakref.WeakKeyDictionary()


def link_cost(comm: Communicator) -> CostModel:
    """The cost of an all-reduce, the same on every rank of `comm`; the first use measures it, on every rank."""
    if comm not in _costs:
        measured = measure_all_reduce(comm)
        _costs[comm] = replace(fit(measured.samples), handling=measured.handling)
    return _costs[comm]
