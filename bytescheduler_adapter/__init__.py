"""ByteScheduler's algorithm: tensors in partitions, the layer nearest the input first, within a credit of bytes."""

from bytescheduler_adapter.optimizer import DistributedOptimizer
from bytescheduler_adapter.scheduled import ScheduledOptimizer
from overlap import api
from overlap.api import *  # noqa: F403  (the facade is the same for every strategy)
from overlap.plan.tuning.options import Tuning

__all__ = ["DistributedOptimizer", "ScheduledOptimizer", "Tuning"]
__all__ += api.__all__
