"""Optimizer state sharded by whole parameters (ZeRO stage 1, as fairscale's OSS), with DeAR's overlap.

import oss as dear
dear.init()
optimizer = dear.DistributedOptimizer(optimizer, model)
"""

from typing import Any

from oss.checkpoint import checkpoint_wrapper, disable_checkpointing
from oss.data_parallel import ShardedDataParallel, ShardedDDP
from oss.fairscale import NOT_HERE
from oss.grad_scaler import ShardedGradScaler
from oss.optimizer import DistributedOptimizer
from oss.sharded_optimizer import OSS
from overlap import api
from overlap.api import *  # noqa: F403  (the facade is the same for every strategy)
from overlap.plan.tuning.options import Tuning

__all__ = ["OSS", "DistributedOptimizer", "Tuning"]
__all__ += ["ShardedDDP", "ShardedDataParallel", "ShardedGradScaler"]  # fairscale's, too
__all__ += ["checkpoint_wrapper", "disable_checkpointing"]
__all__ += api.__all__


def __getattr__(name: str) -> Any:
    """Names of fairscale's that are not here are told with what there is instead."""
    if name in NOT_HERE:
        raise ImportError(NOT_HERE[name], name=__name__)
    raise AttributeError(f"module 'oss' has no attribute {name!r}")
