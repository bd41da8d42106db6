"""Wait-free back-propagation without tensor fusion: the simplest overlap, and the baseline of all others."""

from overlap import api
from overlap.api import *  # noqa: F403  (the facade is the same for every strategy)
from wfbp.optimizer import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
__all__ += api.__all__
