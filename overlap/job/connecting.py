"""Connects this process to all ranks, by its launcher's means or by a communicator that the script gives."""

from __future__ import annotations

import os
from typing import Any

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

__all__ = ["connect", "meet"]


def meet(launch: Launch, comm: Any) -> Communicator:
    """Connect to the ranks that train together next, in a job whose ranks come and go. On every one of them."""
    adopted = comm is not None or (torch.distributed.is_available() and torch.distributed.is_initialized())
    problem = regrouping.obstacle(os.environ, launch, adopted)
    if problem is not None:
        raise _said(LaunchError(problem), launch)
    return regrouping.connect(launch)


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
            return _connection(launch, comm, arrival)
        with Limit(arrival.describe, warn_after=wanted.stall_warn_seconds, abort_after=wanted.stall_abort_seconds):
            return _connection(launch, comm, arrival)
    except comm_core.InvalidUsage as error:
        if not str(error).startswith("COMM_CORE_"):
            raise
        raise _said(SettingError(f"environment variable {error}; correct or unset it"), launch) from error


def _said(error: Exception, launch: Launch) -> Exception:
    failures.say_in_one_line(error, launch.rank)
    return error


def _connection(launch: Launch, comm: Any, arrival: Arrival) -> Communicator:
    if isinstance(comm, Communicator):
        return comm
    if comm is not None and hasattr(comm, "py2f"):
        return NativeCommunicator(comm_core.mpi(comm))
    if _is_process_group(comm):
        from overlap.transport.torch.communicator import connect

        return connect(comm)
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
        native = comm_core.mpi() if comm_core.mpi_available() else comm_core.local()
        return NativeCommunicator(native)
    if launch.launcher is Launcher.TORCHRUN:
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            problem = no_meeting(os.environ)
            if problem is not None:
                raise _said(LaunchError(problem), launch)
        from overlap.transport.torch.communicator import connect

        return connect(awaited=arrival.await_ranks)
    return NativeCommunicator(comm_core.local())


def _is_process_group(comm: Any) -> bool:
    return torch.distributed.is_available() and isinstance(comm, torch.distributed.ProcessGroup)
