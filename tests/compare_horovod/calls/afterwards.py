"""Calls after `shutdown()`."""

from __future__ import annotations

import torch

from tests.compare_horovod.calls.call import Calls, ones

__all__ = ["CALLS"]

CALLS: Calls = {
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
