"""Wait-free back-propagation without tensor fusion: the simplest overlap, and the baseline of all others."""

from overlap.api import *
from overlap.api import __all__ as _facade
from wfbp.optimizer import DistributedOptimizer

__all__ = ["DistributedOptimizer", *_facade]
