"""Where ranks do not do the same: they disagree, run out of data one after the other, or have shut down."""

from __future__ import annotations

from typing import Any

import torch

from tests.compare_horovod.calls.call import Calls, ones, ramp

__all__ = ["AFTER_SHUTDOWN", "DISAGREEMENTS", "JOIN"]


def _type(r: int, other: torch.dtype) -> torch.dtype:
    return torch.float32 if r else other


# What rank 0 asks for, and what the others do under the same name. With one rank nobody disagrees.
DISAGREEMENTS: Calls = {
    "allreduce of other shapes": lambda hvd, r, n: hvd.allreduce(ones(3 if r else 2), name="shape"),
    "allreduce of as many elements": lambda hvd, r, n: hvd.allreduce(ones(2, 3) if r else ones(3, 2), name="turned"),
    "allreduce of other dimensions": lambda hvd, r, n: hvd.allreduce(ones(2, 2) if r else ones(2), name="dim"),
    "allreduce of other types": lambda hvd, r, n: hvd.allreduce(ones(2, dtype=_type(r, torch.float64)), name="type"),
    "allreduce, Average and Sum": lambda hvd, r, n: hvd.allreduce(ones(2), op=hvd.Sum if r else hvd.Average, name="a"),
    "allreduce, Min and Sum": lambda hvd, r, n: hvd.allreduce(ones(2), op=hvd.Sum if r else hvd.Min, name="m"),
    "allreduce, prescale_factor": lambda hvd, r, n: hvd.allreduce(ones(2), prescale_factor=1.0 + (r > 0), name="pre"),
    "allreduce, postscale_factor": lambda hvd, r, n: hvd.allreduce(
        ones(2), op=hvd.Sum, postscale_factor=1.0 + (r > 0), name="post"
    ),
    "broadcast from other roots": lambda hvd, r, n: hvd.broadcast(ones(2), min(r, 1), name="root"),
    "broadcast of other shapes": lambda hvd, r, n: hvd.broadcast(ones(3 if r else 2), 0, name="bshape"),
    "broadcast of other types": lambda hvd, r, n: hvd.broadcast(ones(2, dtype=_type(r, torch.int32)), 0, name="btype"),
    "allgather of other columns": lambda hvd, r, n: hvd.allgather(ones(2, 3 if r else 2), name="columns"),
    "allgather of other dimensions": lambda hvd, r, n: hvd.allgather(ones(2, 2) if r else ones(2), name="gdim"),
    "allgather of other types": lambda hvd, r, n: hvd.allgather(ones(2, dtype=_type(r, torch.int32)), name="gtype"),
    "alltoall of other columns": lambda hvd, r, n: hvd.alltoall(ones(n, 3 if r else 2), name="acolumns"),
    "reducescatter of other rows": lambda hvd, r, n: hvd.reducescatter(ones(3 if r else 2, 2), name="rows"),
    "reducescatter, Average and Sum": lambda hvd, r, n: hvd.reducescatter(
        ones(2, 2), op=hvd.Sum if r else hvd.Average, name="rop"
    ),
    "a group's shapes": lambda hvd, r, n: hvd.grouped_allreduce([ones(2), ones(3 if r else 2)], name="gshape"),
    "a group's size": lambda hvd, r, n: hvd.grouped_allreduce([ones(2)] * (3 if r else 2), name="gsize"),
    "another operation": lambda hvd, r, n: (hvd.allreduce if r else hvd.allgather)(ones(2), name="operation"),
}


def _uneven(hvd: Any, r: int, n: int, call: Any) -> Any:
    """Every rank makes one call; all but rank 0, which has joined by then, a second one."""
    results = [call("both")]
    if r:
        try:
            results.append(call("later"))
        except hvd.HorovodInternalError as error:
            results.append(type(error).__name__)
    return [results, hvd.join() >= 0]


JOIN: Calls = {
    "join": lambda hvd, r, n: hvd.join() in range(n),
    "join of all but rank 0": lambda hvd, r, n: [hvd.allreduce(ones(1), name="one more") if r == 0 else 0, hvd.join()],
    "Average": lambda hvd, r, n: _uneven(hvd, r, n, lambda name: hvd.allreduce(ones(1) * (r + 1), name=name)),
    "Sum": lambda hvd, r, n: _uneven(hvd, r, n, lambda name: hvd.allreduce(ones(1) * (r + 1), name=name, op=hvd.Sum)),
    "Min": lambda hvd, r, n: _uneven(hvd, r, n, lambda name: hvd.allreduce(ones(1) * (r + 1), name=name, op=hvd.Min)),
    "broadcast": lambda hvd, r, n: _uneven(hvd, r, n, lambda name: hvd.broadcast(ones(1), n - 1, name=name)),
    "allgather": lambda hvd, r, n: _uneven(hvd, r, n, lambda name: hvd.allgather(ones(1) * r, name=name)),
    "alltoall": lambda hvd, r, n: _uneven(hvd, r, n, lambda name: hvd.alltoall(ramp(n), name=name)),
    "reducescatter": lambda hvd, r, n: _uneven(hvd, r, n, lambda name: hvd.reducescatter(ramp(n), name=name)),
    "join(-2)": lambda hvd, r, n: hvd.join(-2) >= 0,
}

AFTER_SHUTDOWN: Calls = {
    "rank": lambda hvd, r, n: hvd.rank(),
    "size": lambda hvd, r, n: hvd.size(),
    "local_rank": lambda hvd, r, n: hvd.local_rank(),
    "is_initialized": lambda hvd, r, n: hvd.is_initialized(),
    "shutdown": lambda hvd, r, n: hvd.shutdown(),
    "allreduce": lambda hvd, r, n: hvd.allreduce(ones(1)),
    "allgather": lambda hvd, r, n: hvd.allgather(ones(1)),
    "broadcast": lambda hvd, r, n: hvd.broadcast(ones(1), 0),
    "barrier": lambda hvd, r, n: hvd.barrier(),
    "broadcast_object": lambda hvd, r, n: hvd.broadcast_object(1, 0),
    "mpi_enabled": lambda hvd, r, n: hvd.mpi_enabled(),
    "mpi_threads_supported": lambda hvd, r, n: hvd.mpi_threads_supported(),
    "rank in the global process set": lambda hvd, r, n: hvd.global_process_set.rank(),
    "poll": lambda hvd, r, n: hvd.poll(0),
    "DistributedOptimizer": lambda hvd, r, n: hvd.DistributedOptimizer(
        torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=1)
    ),
    "init": lambda hvd, r, n: hvd.init() and None,
    "size, initialised again": lambda hvd, r, n: hvd.size(),
}
