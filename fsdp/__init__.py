"""Fully sharded data parallel: every rank keeps its share of parameters, gradients and optimizer state."""

from typing import Any

from fsdp.fairscale import FSDP, FullyShardedDataParallel, get_fsdp_instances
from fsdp.fully_shard import fully_shard
from fsdp.groups import gen_fsdp_args
from fsdp.module import FSDPModule, register_fsdp_forward_method
from fsdp.names import NOT_HERE
from fsdp.optimizer import DistributedOptimizer
from fsdp.wrap import auto_wrap, config_auto_wrap_policy, default_auto_wrap_policy, enable_wrap, wrap
from overlap import api
from overlap.api import *  # noqa: F403  (the facade is the same for every strategy)

__all__ = ["DistributedOptimizer", "FSDPModule", "fully_shard", "register_fsdp_forward_method"]
__all__ += ["FSDP", "FullyShardedDataParallel", "gen_fsdp_args", "get_fsdp_instances"]  # fairscale's, too
__all__ += ["auto_wrap", "config_auto_wrap_policy", "default_auto_wrap_policy", "enable_wrap", "wrap"]
__all__ += api.__all__


def __getattr__(name: str) -> Any:
    """Names of fairscale's that are not here are told with what there is instead."""
    if name in NOT_HERE:
        raise ImportError(NOT_HERE[name], name=__name__)
    raise AttributeError(f"module 'fsdp' has no attribute {name!r}")
