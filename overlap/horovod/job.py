"""Beginning and end of a job, this process's place in it, and what it was built with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed

import comm_core
from overlap.horovod.controller.enqueue import attach
from overlap.horovod.controller.errors import NotInitialized
from overlap.horovod.process_sets import add_process_set
from overlap.job import session
from overlap.job.process_set import ProcessSet
from overlap.job.session import Session, is_initialized, shutdown

__all__ = [
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "rocm_built",
    "shutdown",
    "size",
]


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> Session:
    """Join the job that started this process. On every rank; calling it again changes nothing.

    Args:
        comm: an mpi4py communicator to use instead of all processes that the launcher started. Horovod's list of ranks
            is accepted when it names all of them, or none; to communicate among some, use `process_sets`.
        process_sets: sets to register at once, the same on all ranks. Sets can also be added later; Horovod's
            ``"dynamic"``, which asks for that, is accepted.

    Raises :class:`overlap.job.launch.LaunchError` when launcher and communicator disagree about the size of the job, and
    ``ValueError`` for arguments that cannot be honoured.
    """
    if isinstance(process_sets, str) and process_sets.lower() != "dynamic":
        raise ValueError(f"process_sets should be a list of ProcessSet or 'dynamic' and is {process_sets!r}")
    wanted = None if isinstance(comm, list | tuple | range) else comm
    started = session.init(wanted)
    attach(started)
    if wanted is not comm and len(comm) > 0 and sorted(comm) != list(range(started.comm.size)):
        raise ValueError(
            f"comm={list(comm)} names some of {started.comm.size} ranks; start only those, or pass "
            "process_sets=[ProcessSet(ranks)] and give that set to the collectives"
        )
    for process_set in process_sets or () if not isinstance(process_sets, str) else ():
        if process_set.process_set_id is None:
            add_process_set(process_set)
    return started


def _session() -> Session:
    if not is_initialized():
        raise NotInitialized(session.uninitialized())
    return session.current()


def rank() -> int:
    """This process's number, 0 to ``size() - 1``."""
    return _session().comm.rank


def size() -> int:
    """How many processes train together."""
    return _session().comm.size


def local_rank() -> int:
    """This process's number among those of its host."""
    return _session().local_rank


def local_size() -> int:
    """How many of the processes run on this host."""
    return _session().local_size


def cross_rank() -> int:
    """This host's number among those of the job."""
    return _session().cross_rank


def cross_size() -> int:
    """How many hosts the job runs on."""
    return _session().cross_size


def is_homogeneous() -> bool:
    """Whether every host runs the same number of processes."""
    return _session().homogeneous


def mpi_built() -> bool:
    """Whether comm_core was built with MPI and its library loads."""
    return comm_core.mpi_available()


def mpi_enabled() -> bool:
    """Whether this job communicates over MPI; False before ``init()``."""
    return is_initialized() and session.current().comm.backend == "mpi"


def mpi_threads_supported() -> bool:
    """Whether the script may call MPI too, from any thread.

    Raises ``ValueError`` when the job does not communicate over MPI or before ``init()``.
    """
    if _session().comm.backend != "mpi":
        raise ValueError(f"this job communicates over {session.current().comm.backend}, not over MPI")
    from mpi4py import MPI

    return bool(MPI.Query_thread() == MPI.THREAD_MULTIPLE)


def gloo_built() -> bool:
    """Whether torch.distributed has gloo, over which jobs of torchrun communicate."""
    return torch.distributed.is_available() and torch.distributed.is_gloo_available()


def gloo_enabled() -> bool:
    """Whether this job communicates over gloo; False before ``init()``."""
    return is_initialized() and session.current().comm.backend == "gloo"


def nccl_built() -> int:
    """0: collectives move tensors over MPI or gloo; those on a GPU travel through the host."""
    return 0


def cuda_built() -> bool:
    """False: no collective runs on a GPU."""
    return False


def rocm_built() -> bool:
    """False: no collective runs on a GPU."""
    return False


def ddl_built() -> bool:
    """False: IBM's DDL is not supported."""
    return False


def ccl_built() -> bool:
    """False: oneCCL is not supported."""
    return False
