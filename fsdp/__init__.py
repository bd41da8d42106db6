"""Fully sharded data parallel: every rank keeps its share of parameters, gradients and optimizer state."""

from fsdp.fully_shard import fully_shard
from fsdp.module import FSDPModule, register_fsdp_forward_method
from fsdp.optimizer import DistributedOptimizer
from overlap import api
from overlap.api import *  # noqa: F403  (the facade is the same for every strategy)

__all__ = ["DistributedOptimizer", "FSDPModule", "fully_shard", "register_fsdp_forward_method"]
__all__ += api.__all__
