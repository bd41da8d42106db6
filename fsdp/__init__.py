"""Fully sharded data parallel: every rank keeps its share of parameters, gradients and optimizer state."""

from fsdp.optimizer import DistributedOptimizer
from overlap import api
from overlap.api import *  # noqa: F403  (the facade is the same for every strategy)

__all__ = ["DistributedOptimizer"]
__all__ += api.__all__
