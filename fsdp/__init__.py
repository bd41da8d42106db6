"""Fully sharded data parallel: every rank keeps its share of parameters, gradients and optimizer state."""

from fsdp.fairscale import FSDP, FullyShardedDataParallel, get_fsdp_instances
from fsdp.fully_shard import fully_shard
from fsdp.groups import gen_fsdp_args
from fsdp.module import FSDPModule, register_fsdp_forward_method
from fsdp.optimizer import DistributedOptimizer
from fsdp.wrap import auto_wrap, config_auto_wrap_policy, default_auto_wrap_policy, enable_wrap, wrap
from overlap import api
from overlap.api import *  # noqa: F403  (the facade is the same for every strategy)

__all__ = ["DistributedOptimizer", "FSDPModule", "fully_shard", "register_fsdp_forward_method"]
__all__ += ["FSDP", "FullyShardedDataParallel", "gen_fsdp_args", "get_fsdp_instances"]  # fairscale's, too
__all__ += ["auto_wrap", "config_auto_wrap_policy", "default_auto_wrap_policy", "enable_wrap", "wrap"]
__all__ += api.__all__
