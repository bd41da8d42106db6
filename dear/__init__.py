"""DeAR: data-parallel training whose all-reduce is split into reduce-scatter and all-gather, each hidden in its half.

import dear
dear.init()
optimizer = dear.DistributedOptimizer(optimizer, model)
"""

from dear.optimizer import DistributedOptimizer
from overlap import api
from overlap.api import *  # noqa: F403  (the facade is the same for every strategy)
from overlap.plan.tuning.options import Tuning

__all__ = ["DistributedOptimizer", "Tuning"]
__all__ += api.__all__
