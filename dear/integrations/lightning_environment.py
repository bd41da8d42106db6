"""Tells Lightning the ranks of dear's session where Lightning does not know the launcher, as under mpirun."""

from __future__ import annotations

import importlib
import os
import sys
from importlib.util import find_spec
from typing import Any

from overlap.api import init
from overlap.health.failures import say_in_one_line
from overlap.job.launch import Launcher, LaunchError, detect
from overlap.job.session import Session, current, is_initialized

__all__ = ["FABRIC", "PYTORCH", "DearEnvironment", "check_processes", "environment_of", "launcher"]

# The two packages of Lightning hold the same classes twice. Who has imported the older name alone uses that one.
_OLD = ("pytorch_lightning" in sys.modules and "lightning" not in sys.modules) or find_spec("lightning") is None
PYTORCH = "pytorch_lightning" if _OLD else "lightning.pytorch"
FABRIC = "lightning_fabric" if _OLD else "lightning.fabric"
_environments: Any = importlib.import_module(f"{FABRIC}.plugins.environments")


class DearEnvironment(_environments.ClusterEnvironment):
    """The plugin ``DearEnvironment()`` for strategies other than dear's; dear's own strategies take it by themselves.

    The first question on each rank is ``dear.init()``, which all ranks have to come to.
    """

    @property
    def _session(self) -> Session:
        return init()

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @staticmethod
    def detect() -> bool:
        return environment_of() is not None

    @property
    def main_address(self) -> str:
        return _found("MASTER_ADDR")

    @property
    def main_port(self) -> int:
        return int(_found("MASTER_PORT"))

    def world_size(self) -> int:
        return self._session.comm.size

    def set_world_size(self, size: int) -> None:
        """Do nothing: the launcher decides the job's size; see :func:`check_processes`."""

    def global_rank(self) -> int:
        return self._session.comm.rank

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the launcher decides the ranks."""

    def local_rank(self) -> int:
        return self._session.local_rank

    def node_rank(self) -> int:
        return self._session.cross_rank

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        check_processes(self, num_devices, num_nodes)


def _found(variable: str) -> str:
    """What ``init()`` has set. Raises ``RuntimeError`` where it was told not to, or could not, and warned."""
    init()
    if variable not in os.environ:
        raise RuntimeError(
            "Lightning communicates over torch.distributed's default group, and dear.init() made none: leave out "
            "torch_distributed=False, or see its warning"
        )
    return os.environ[variable]


def launcher() -> Launcher:
    """The launcher that started this process."""
    return detect(os.environ).launcher


def environment_of() -> Any:
    """The plugin that tells Lightning its ranks; None where what Lightning finds by itself is right.

    That is so under torchrun, without a launcher, and under srun, whose jobs Lightning also puts back into the queue. What
    mpirun starts inside an allocation of SLURM has other ranks than SLURM's variables say, and of a job that is told by
    ``RANK`` and ``WORLD_SIZE`` alone Lightning knows nothing.
    """
    launch = detect(os.environ)
    by_slurm = launch.source.startswith("srun") and _environments.SLURMEnvironment.detect()
    alone = launch.launcher is Launcher.SINGLE
    return None if alone or by_slurm or _environments.TorchElasticEnvironment.detect() else DearEnvironment()


def check_processes(environment: Any, devices: int, num_nodes: int) -> None:
    """Raise ``LaunchError`` where Lightning was given another number of processes than the job has. On every rank.

    Where nobody catches it, rank 0 says it in one line.
    """
    launch, rank = detect(os.environ), 0
    if isinstance(environment, DearEnvironment):
        session = init()
        rank, local, hosts = session.comm.rank, session.local_size, session.comm.size // session.local_size
    elif launch.launcher is Launcher.TORCHRUN and launch.local_size:
        rank, local, hosts = launch.rank, launch.local_size, launch.size // launch.local_size
    elif launch.launcher is Launcher.SINGLE and is_initialized() and current().comm.size == 1:
        local, hosts = 1, 1
    else:
        return  # Lightning starts the processes, or checks their number itself
    if (local, hosts) == (devices, num_nodes):
        return
    remedy = f"give devices={local}, num_nodes={hosts}"
    if launch.launcher is Launcher.SINGLE:
        remedy = "start with dearrun or torchrun, or leave out dear.init(), so that Lightning can start the others"
    error = LaunchError(
        f"devices={devices} and num_nodes={num_nodes} mean {devices} process(es) on each of {num_nodes} host(s), and this "
        f"job has {local} on each of {hosts} ({launch.source}): {remedy}"
    )
    say_in_one_line(error, rank)
    raise error
