"""Jobs that survive the loss of a rank by being launched again: named and shaped as Horovod's elastic API.

There is no rendezvous within the process: a failure ends the job, the launcher (``torchrun --max-restarts``, a loop
around mpirun, the scheduler) starts it again at whatever world size it finds, and training continues from the last
commit on disk.
"""

from overlap.elastic.run import run
from overlap.elastic.sampler import ElasticSampler
from overlap.elastic.state import HostsUpdatedInterrupt, ObjectState, State, TorchState
from overlap.elastic.store import CommitError

__all__ = [
    "CommitError",
    "ElasticSampler",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "TorchState",
    "run",
]
