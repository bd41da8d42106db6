"""CO2: each rank makes local steps, and the outer step's communication runs under the local steps that follow.

Not synchronous SGD.

import co2
co2.init()
optimizer = co2.DistributedOptimizer(optimizer, model, outer_frequency=12)

Or, as in fairscale-CO2, with a plain optimizer:

model = co2.CO2DistributedDataParallel(model, outer_momentum=0.2, nprocs_per_node=8)
"""

from co2.data_parallel import CO2DistributedDataParallel
from co2.optimizer import DistributedOptimizer
from co2.recovery.keep_going import keep_going
from co2.suggestion import suggest_frequency
from overlap import api
from overlap.api import *  # noqa: F403  (the facade is the same for every strategy)

__all__ = ["CO2DistributedDataParallel", "DistributedOptimizer", "keep_going", "suggest_frequency"]
__all__ += api.__all__
