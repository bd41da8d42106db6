"""MG-WFBP: wait-free back-propagation that merges tensors where that is cheaper than another start."""

from mgwfbp.backward_times import profile_backward
from mgwfbp.optimizer import DistributedOptimizer
from overlap import api
from overlap.api import *  # noqa: F403  (the facade is the same for every strategy)
from overlap.plan.tuning.options import Tuning

__all__ = ["DistributedOptimizer", "Tuning", "profile_backward"]
__all__ += api.__all__
