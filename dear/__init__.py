"""DeAR: data-parallel training whose all-reduce is split into reduce-scatter and all-gather, each hidden in its half.

import dear
dear.init()
optimizer = dear.DistributedOptimizer(optimizer, model)
"""

from dear.optimizer import DistributedOptimizer
from overlap.api import (
    Average,
    Max,
    Min,
    Product,
    Sum,
    allgather,
    allgather_object,
    allreduce,
    allreduce_,
    barrier,
    broadcast,
    broadcast_,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
    clip_grad_norm_,
    init,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from overlap.recording import draw_timeline, start_timeline, stop_timeline
from overlap.sync_batch_norm import SyncBatchNorm
from overlap.tuning.options import Tuning

__all__ = [
    "Average",
    "DistributedOptimizer",
    "Max",
    "Min",
    "Product",
    "Sum",
    "SyncBatchNorm",
    "Tuning",
    "allgather",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "clip_grad_norm_",
    "draw_timeline",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]
