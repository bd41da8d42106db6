"""Begins and ends a job, and tells this process's place in it, its process sets, and how it was built."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import comm_core
from comm_core import TransportError
from overlap.horovod.allreduce import stand_in
from overlap.horovod.controller.enqueue import attach, runtime, telling_others
from overlap.horovod.controller.errors import NotInitialized
from overlap.horovod.controller.operation import Nothing
from overlap.horovod.controller.request import Kind, Request
from overlap.job import session
from overlap.job.launch import InitMethod, Launcher
from overlap.job.process_set import ProcessSet, global_process_set
from overlap.job.regrouping import ranks_change
from overlap.job.session import Session, is_initialized, shutdown

__all__ = [
    "add_process_set",
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
    "regroup",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
]

log = logging.getLogger("dear")

_SETS = "process set"  # what requests about them are called


def init(
    comm: Any = None,
    process_sets: Sequence[ProcessSet] | str | None = None,
    *,
    torch_distributed: bool = True,
    init_method: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
) -> Session:
    """Join the job that started this process. On every rank; calling it again changes nothing.

    Args:
        comm: an mpi4py communicator to use instead of all processes that the launcher started. Horovod's list of ranks
            is accepted when it names all of them, or none; to communicate among some, use `process_sets`.
        process_sets: sets to register at once, the same on all ranks. Sets can also be added later; Horovod's
            ``"dynamic"``, which asks for that, is accepted.
        torch_distributed: under MPI, make torch.distributed's default group of the ranks of this job, over gloo, and set
            the variables that tell of it (``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``, …), so that libraries which ask
            torch.distributed find it. :func:`shutdown` ends it. False: leave torch.distributed to the script. It has no
            effect where the script has initialised torch.distributed already, under torchrun, and in one process alone.
            Where a rank cannot make it, all train without it, and rank 0 warns.
        init_method: where processes meet that no MPI brings together, as for ``init_process_group()``:
            ``"tcp://10.0.0.1:29500"`` or ``"file:///shared/new"``. torch.distributed gets a default group, until
            :func:`shutdown`.
        rank: of this process, where no launcher tells it.
        world_size: how many they are, where no launcher tells it.

    Raises :class:`overlap.job.launch.LaunchError` when launcher and communicator disagree about the size of the job, and
    ``ValueError`` for arguments that cannot be honoured.
    """
    if isinstance(process_sets, str) and process_sets.lower() != "dynamic":
        raise ValueError(f"process_sets should be a list of ProcessSet or 'dynamic' and is {process_sets!r}")
    if init_method is None and (rank, world_size) != (None, None):
        raise ValueError(f"rank={rank} and world_size={world_size} belong to init_method, which is not given")
    wanted = None if isinstance(comm, list | tuple | range) else comm
    meeting = None if init_method is None else InitMethod(init_method, rank, world_size)
    if wanted is not None and meeting is not None:
        raise ValueError("comm and init_method both say which processes train together: leave one of them out")
    started = _join(wanted, torch_distributed, meeting)
    if wanted is not comm and len(comm) > 0 and sorted(comm) != list(range(started.comm.size)):
        raise ValueError(
            f"comm={list(comm)} names some of {started.comm.size} ranks; start only those, or pass "
            "process_sets=[ProcessSet(ranks)] and give that set to the collectives"
        )
    for process_set in process_sets or () if not isinstance(process_sets, str) else ():
        if process_set.process_set_id is None:
            add_process_set(process_set)
    return started


def _join(comm: Any, torch_distributed: bool, meeting: InitMethod | None) -> Session:
    """Once more where ranks are lost meanwhile, if this job goes on without them."""
    while True:
        try:
            started = session.init(comm, torch_distributed, meeting)
            attach(started, stand_in)
            if started.roster is not None:
                started.roster.begin()
            return started
        except TransportError as error:
            if not ranks_change():
                raise
            log.warning("once more, since ranks have changed: %s", error)
        session.abandon()


def regroup() -> Session:
    """The session of the ranks that train together from now on, where ranks are lost or wait to come in.

    On every rank of the old one that is left; see `overlap.job.regrouping`. Not inside ``except``. Optimizers of the old
    session are at their end.
    """
    torch_distributed = session.current().torch_distributed
    session.abandon()
    return _join(None, torch_distributed, None)


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Register a set, or one made of these ranks, and return it. On every rank of the job, members or not.

    Raises :class:`Mismatch`, a ``ValueError`` and a ``HorovodInternalError``, on every rank when ranks disagree, when some
    are not in the job or when there is such a set already, and ``ValueError`` for a set that is registered.
    """
    found = runtime()
    with telling_others(Kind.ADD_PROCESS_SET, _SETS, global_process_set):
        wanted = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
        if wanted.process_set_id is not None:
            raise ValueError(f"{wanted} is registered already")
    request = Request(Kind.ADD_PROCESS_SET, _SETS, ranks=tuple(wanted.ranks or ()))
    found.remember(found.submit(request, Nothing()).wait(), wanted)
    return wanted


def remove_process_set(process_set: ProcessSet) -> bool:
    """Forget a set; what is under way in it fails. On every rank of the job.

    Returns False, and does nothing, for a set that is not registered and for the set of all ranks.
    """
    found = runtime()
    with telling_others(Kind.REMOVE_PROCESS_SET, _SETS, global_process_set):
        if not isinstance(process_set, ProcessSet):
            raise TypeError(f"process_set should be a ProcessSet and is {type(process_set).__name__}")
    if not process_set.process_set_id:
        return False
    request = Request(Kind.REMOVE_PROCESS_SET, _SETS, ranks=tuple(process_set.ranks or ()))
    found.forget(found.submit(request, Nothing()).wait())
    return True


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
    """Whether MPI connects the ranks of this job, over whatever the bytes go; False before ``init()``."""
    return is_initialized() and _connected_by_mpi()


def _connected_by_mpi() -> bool:
    found = session.current()
    return found.comm.backend == "mpi" or (found.comm.backend == "tcp" and found.launch.launcher is Launcher.MPI)


def mpi_threads_supported() -> bool:
    """Whether the script may call MPI too, from any thread.

    Raises ``ValueError`` when MPI does not connect the ranks of this job, or before ``init()``.
    """
    _session()
    if not _connected_by_mpi():
        raise ValueError(f"this job communicates over {session.current().comm.backend}, not over MPI")
    from mpi4py import MPI

    return bool(MPI.Query_thread() == MPI.THREAD_MULTIPLE)


def gloo_built() -> bool:
    """True: jobs communicate over TCP without MPI, which in Horovod is gloo's part."""
    return True


def gloo_enabled() -> bool:
    """Whether this job has TCP and no MPI, which in Horovod is gloo's part; False before ``init()``."""
    return is_initialized() and not _connected_by_mpi() and session.current().comm.backend in ("tcp", "gloo")


def nccl_built() -> int:
    """0, as Horovod's collectives here move tensors over MPI or gloo; those on a GPU travel through the host."""
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
