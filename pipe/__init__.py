"""Pipeline parallelism: consecutive layers of a model in stages, through which micro-batches follow one another.

model = pipe.Pipe(torch.nn.Sequential(a, b, c, d), balance=[2, 2], devices=[0, 1], chunks=8)      # in one process
model = pipe.Pipe(torch.nn.Sequential(a, b, c, d), balance=[2, 2], mesh=mesh, chunks=8, loss=loss)  # a stage on each rank
"""

from pipe.balance import balance_by_size, balance_by_time
from pipe.batch_norm import DeferredBatchNorm
from pipe.checkpointing import is_checkpointing, is_recomputing
from pipe.pipe import Pipe
from pipe.skip import Namespace, pop, skippable, stash, verify_skippables

__all__ = [
    "DeferredBatchNorm",
    "Namespace",
    "Pipe",
    "balance_by_size",
    "balance_by_time",
    "is_checkpointing",
    "is_recomputing",
    "pop",
    "skippable",
    "stash",
    "verify_skippables",
]
