"""Connects this process to all ranks, by its launcher's means or by a communicator that the script gives.

Bytes go over comm_core's own connections where torchrun started the job. Where mpirun did, they do so between hosts that
have nothing faster than TCP; else MPI moves them. ``DEAR_TRANSPORT`` chooses.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

import comm_core
from overlap.health import failures
from overlap.health.limit import Limit
from overlap.job import fabric, regrouping
from overlap.job.arrival import Arrival
from overlap.job.launch import Launch, Launcher, LaunchError, no_meeting
from overlap.job.meeting import Unreachable, meeting_address, network
from overlap.job.settings import SettingError, Settings
from overlap.trace import file as trace_file
from overlap.trace import timeline
from overlap.transport.communicator import Communicator
from overlap.transport.native import NativeCommunicator
from overlap.transport.objects import NotSent, allgather_made, allgather_object
from overlap.transport.tcp import TcpCommunicator, TcpOptions
from overlap.transport.torch.interfaces import listening_toward

if TYPE_CHECKING:
    from overlap.transport.torch.communicator import Wire

__all__ = ["Host", "connect", "meet", "tcp_suffices"]

log = logging.getLogger("dear")

# Seconds for ranks to connect. Where another way is left, nobody waits minutes for packets that a firewall drops.
_PATIENCE, _SHORT_PATIENCE = 300.0, 30.0


@dataclass(frozen=True, slots=True)
class Host:
    """What decides how a rank's bytes should travel."""

    transport: str  # as its environment wishes
    network: tuple[str, ...]  # equal for processes that reach each other on the loopback interface
    fabric: list[str]  # devices of networks that MPI may use


def tcp_suffices(hosts: Sequence[Host]) -> bool:
    """Whether TCP is the fastest way for ranks that MPI has connected (pure).

    On one host MPI's shared memory is as fast, and a fabric is faster.
    """
    return len({host.network for host in hosts}) > 1 and not any(host.fabric for host in hosts)


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
            problem = no_meeting(os.environ) if launch.init_method is None else None
            if problem is not None:
                raise _said(LaunchError(problem), launch)
        from overlap.transport.torch.communicator import connect
        from overlap.transport.torch.rendezvous import ENVIRONMENT

        told = launch.init_method
        place = ENVIRONMENT if told is None else (told, launch.rank, launch.size)
        return connect(_wire(wanted, launch), awaited=arrival.await_ranks, place=place)
    return NativeCommunicator(comm_core.local())


def _over_mpi(comm: Any, wanted: Settings, launch: Launch) -> Communicator:
    """By MPI; its library may as well only bring the ranks together."""
    core = comm_core.mpi(comm)
    over_mpi = NativeCommunicator(core)
    told = allgather_object(over_mpi, Host(wanted.transport, network(), fabric.devices()))
    transport = told[0].transport  # a launcher may have given the variable to some hosts alone
    if transport == "gloo":
        raise _said(LaunchError(f"DEAR_TRANSPORT=gloo, but ranks were {launch.source}: start with torchrun"), launch)
    if transport == "mpi" or core.size == 1:
        return over_mpi
    try_only = transport == "auto"
    if try_only and not tcp_suffices(told):
        return over_mpi
    try:
        address = meeting_address(over_mpi)
        hosts = allgather_made(over_mpi, lambda: listening_toward(address))[core.rank]
        options = _tcp(wanted).arguments(core.size, _SHORT_PATIENCE if try_only else _PATIENCE)
        made = comm_core.tcp(core.rank, core.size, comm_core.exchange_over(core), hosts=hosts, **options)
    except comm_core.MpiError:
        raise
    except (Unreachable, NotSent, comm_core.TransportError) as error:  # on every rank
        if not try_only:
            raise
        if core.rank == 0:
            log.warning("MPI moves the bytes, since ranks do not reach each other over TCP: %s", error)
        return over_mpi
    return TcpCommunicator(made, core.close)


def _wire(wanted: Settings, launch: Launch) -> Wire:
    from overlap.transport.torch.communicator import Wire

    if wanted.transport == "mpi":
        problem = "DEAR_TRANSPORT=mpi, but no MPI has brought these ranks together: start with mpirun"
        raise _said(LaunchError(problem), launch)
    return Wire(gloo=wanted.transport == "gloo", tcp=_tcp(wanted))


def _tcp(wanted: Settings) -> TcpOptions:
    return TcpOptions(wanted.stall_abort_seconds or None, wanted.tcp_sockets)


def _is_process_group(comm: Any) -> bool:
    return torch.distributed.is_available() and isinstance(comm, torch.distributed.ProcessGroup)
