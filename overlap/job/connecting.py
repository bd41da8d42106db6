"""Connects this process to all ranks, by its launcher's means or by a communicator that the script gives.

Bytes go over comm_core's own connections where torchrun started the job, and over MPI where mpirun did, whose library may
know a faster network. ``DEAR_TRANSPORT`` chooses.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

import comm_core
from overlap.health import failures
from overlap.health.limit import Limit
from overlap.job import regrouping
from overlap.job.arrival import Arrival
from overlap.job.launch import Launch, Launcher, LaunchError, no_meeting
from overlap.job.settings import SettingError, Settings
from overlap.trace import file as trace_file
from overlap.trace import timeline
from overlap.transport.communicator import Communicator
from overlap.transport.native import NativeCommunicator

if TYPE_CHECKING:
    from overlap.transport.torch.communicator import Wire

__all__ = ["connect", "meet"]


def meet(launch: Launch, comm: Any, wanted: Settings) -> Communicator:
    """Connect to the ranks that train together next, in a job whose ranks come and go. On every one of them."""
    adopted = comm is not None or (torch.distributed.is_available() and torch.distributed.is_initialized())
    problem = regrouping.obstacle(os.environ, launch, adopted)
    if problem is not None:
        raise _said(LaunchError(problem), launch)
    return regrouping.connect(launch, _wire(wanted, launch))


def connect(launch: Launch, comm: Any, wanted: Settings) -> Communicator:
    """The communicator of all ranks, by the launcher's means, or around `comm`.

    What is wrong with comm_core's own variables, which it reads then, or with the place for a timeline, ends a script.

    So does a rank that the others have waited for as long as they do, which is named where that can be known.
    """
    path = timeline.path_for(wanted.timeline, launch.rank)
    problem = trace_file.obstacle(path) if path else None
    if problem is not None:  # later, the others would wait for this rank, which alone may have the file
        raise _said(SettingError(f"environment variable DEAR_TIMELINE (or HOROVOD_TIMELINE): {problem}"), launch)
    arrival = Arrival(launch, os.environ)
    arrival.say()
    try:
        if launch.size == 1:
            return _connection(launch, comm, wanted, arrival)
        with Limit(arrival.describe, warn_after=wanted.stall_warn_seconds, abort_after=wanted.stall_abort_seconds):
            return _connection(launch, comm, wanted, arrival)
    except comm_core.InvalidUsage as error:
        if not str(error).startswith("COMM_CORE_"):
            raise
        raise _said(SettingError(f"environment variable {error}; correct or unset it"), launch) from error


def _said(error: Exception, launch: Launch) -> Exception:
    failures.say_in_one_line(error, launch.rank)
    return error


def _connection(launch: Launch, comm: Any, wanted: Settings, arrival: Arrival) -> Communicator:
    if isinstance(comm, Communicator):
        return comm
    if comm is not None and hasattr(comm, "py2f"):
        return _over_mpi(comm, wanted, launch)
    if _is_process_group(comm):
        from overlap.transport.torch.communicator import connect

        return connect(_wire(wanted, launch), comm)
    if comm is not None:
        raise TypeError(
            "comm should be an mpi4py communicator, a process group of torch.distributed or an overlap Communicator and "
            f"is {type(comm).__name__}"
        )
    if launch.launcher is Launcher.MPI:
        if launch.size > 1 and not comm_core.mpi_available():
            raise LaunchError(
                f"started by {launch.source}, but comm_core was built without MPI: every process would train alone. "
                "Build the MPI backend with 'python -m comm_core.build', or start with torchrun"
            )
        if not comm_core.mpi_available():
            return NativeCommunicator(comm_core.local())
        return _over_mpi(None, wanted, launch)
    if launch.launcher is Launcher.TORCHRUN:
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            problem = no_meeting(os.environ)
            if problem is not None:
                raise _said(LaunchError(problem), launch)
        from overlap.transport.torch.communicator import connect

        return connect(_wire(wanted, launch), awaited=arrival.await_ranks)
    return NativeCommunicator(comm_core.local())


def _over_mpi(comm: Any, wanted: Settings, launch: Launch) -> Communicator:
    """By MPI; its library may as well only bring the ranks together."""
    if wanted.transport == "gloo":
        raise _said(LaunchError(f"DEAR_TRANSPORT=gloo, but ranks were {launch.source}: start with torchrun"), launch)
    core = comm_core.mpi(comm)
    if wanted.transport != "tcp" or core.size == 1:
        return NativeCommunicator(core)
    from overlap.job.meeting import meeting_address
    from overlap.transport.tcp import TcpCommunicator
    from overlap.transport.torch.interfaces import toward

    found = toward(meeting_address(NativeCommunicator(core)))
    hosts = ["127.0.0.1" if found is None else found.text]
    exchange = comm_core.exchange_over(core)
    made = comm_core.tcp(core.rank, core.size, exchange, hosts=hosts, silence=_silence(wanted))
    return TcpCommunicator(made, core.close)


def _wire(wanted: Settings, launch: Launch) -> Wire:
    from overlap.transport.torch.communicator import Wire

    if wanted.transport == "mpi":
        problem = "DEAR_TRANSPORT=mpi, but no MPI has brought these ranks together: start with mpirun"
        raise _said(LaunchError(problem), launch)
    return Wire(gloo=wanted.transport == "gloo", silence=_silence(wanted))


def _silence(wanted: Settings) -> float | None:
    return wanted.stall_abort_seconds or None


def _is_process_group(comm: Any) -> bool:
    return torch.distributed.is_available() and isinstance(comm, torch.distributed.ProcessGroup)
