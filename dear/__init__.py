"""DeAR: data-parallel training whose all-reduce is split into reduce-scatter and all-gather, each hidden in its half.

import dear
dear.init()
optimizer = dear.DistributedOptimizer(optimizer, model)
"""

from dear.optimizer import DistributedOptimizer
from overlap.api import *
from overlap.api import __all__ as _facade

__all__ = ["DistributedOptimizer", *_facade]
