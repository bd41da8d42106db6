"""Optimizer state sharded by whole parameters (ZeRO stage 1 as fairscale's OSS does it), hidden like DeAR's halves.

import oss as dear
dear.init()
optimizer = dear.DistributedOptimizer(optimizer, model)
"""

from oss.checkpoint import checkpoint_wrapper
from oss.data_parallel import ShardedDataParallel, ShardedDDP
from oss.grad_scaler import ShardedGradScaler
from oss.optimizer import DistributedOptimizer
from oss.sharded_optimizer import OSS
from overlap import api
from overlap.api import *  # noqa: F403  (the facade is the same for every strategy)
from overlap.plan.tuning.options import Tuning

__all__ = ["OSS", "DistributedOptimizer", "Tuning"]
__all__ += ["ShardedDDP", "ShardedDataParallel", "ShardedGradScaler", "checkpoint_wrapper"]  # fairscale's, too
__all__ += api.__all__
