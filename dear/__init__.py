"""DeAR: data-parallel training whose all-reduce is split into reduce-scatter and all-gather, each hidden in its half.

import dear
dear.init()
optimizer = dear.DistributedOptimizer(optimizer, model)
"""

from typing import TYPE_CHECKING, Any

from dear.optimizer import DistributedOptimizer
from overlap import api
from overlap.api import *  # noqa: F403  (the facade is the same for every strategy)
from overlap.plan.tuning.options import Tuning

if TYPE_CHECKING:
    from dearrun.errors import RankError
    from dearrun.run import run

__all__ = ["DistributedOptimizer", "RankError", "Tuning", "run"]
__all__ += api.__all__


def __getattr__(name: str) -> Any:
    """What starts jobs is loaded when it is asked for: ranks do not need it."""
    if name == "run":
        from dearrun.run import run

        return run
    if name == "RankError":
        from dearrun.errors import RankError

        return RankError
    raise AttributeError(f"module 'dear' has no attribute {name!r}")
