"""Optimal sharded data parallel: parameters are sharded, and as many stay whole as a memory limit allows."""

from osdp.memory_plan import MemoryPlan
from osdp.module import OptimalShardedDataParallel
from osdp.optimizer import DistributedOptimizer
from osdp.planned import plan
from osdp.search import DoesNotFit
from osdp.slices import SlicedLinear, split
from overlap import api
from overlap.api import *  # noqa: F403  (the facade is the same for every strategy)

__all__ = [
    "DistributedOptimizer",
    "DoesNotFit",
    "MemoryPlan",
    "OptimalShardedDataParallel",
    "SlicedLinear",
    "plan",
    "split",
]
__all__ += api.__all__
