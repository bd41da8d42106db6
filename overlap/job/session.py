"""The session: this process's place in the job, made by :func:`init` and ended by :func:`shutdown`, the one global."""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing
import os
import socket
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import comm_core
from comm_core import TransportError
from overlap.health import failures
from overlap.health.launcher import agent_gone
from overlap.health.shutdown import close_all, find_uneven, last_limit, report
from overlap.health.stacks import frames, is_front_door
from overlap.health.watchdog import Watchdog
from overlap.job import cores, logs, regrouping, settings
from overlap.job.channels import Channels
from overlap.job.connecting import connect, meet
from overlap.job.launch import (
    ALONE_VARIABLE,
    BACKEND_VARIABLE,
    InitMethod,
    Launch,
    Launcher,
    LaunchError,
    adopted,
    by_init_method,
    detect,
    rank_in,
)
from overlap.job.registry import Registry
from overlap.job.services import Issuer, Participant, Service
from overlap.job.settings import SettingError, Settings
from overlap.trace import timeline
from overlap.transport.communicator import Communicator
from overlap.transport.native import NativeCommunicator
from overlap.transport.objects import allgather_object
from overlap.transport.operation import barrier
from overlap.transport.peer_queries import PeerQueries
from overlap.transport.torch import interfaces

__all__ = [
    "NotInitialized",
    "Session",
    "abandon",
    "current",
    "init",
    "is_initialized",
    "shutdown",
    "uninitialized",
]

if TYPE_CHECKING:
    from overlap.job.default_group import DefaultGroup
    from overlap.job.levels import Levels

if torch.distributed.is_available():
    # Its functions keep the default process group that they find when they are imported, as a default argument, and the
    # first torch.optim constructor imports them. A group would outlive destroy_process_group(), its gloo threads with
    # it, and such a thread that lets go of a tensor while Python ends aborts the process. So before there is a group:
    import torch.distributed.nn.functional

log = logging.getLogger("dear")

_RANKS_PROCESS = "DEAR_RANK_PROCESS"  # the environment variable by which processes that a rank starts know of it


class Session:
    """The communicator of all ranks, this rank's place among them, and the services that run beside training."""

    def __init__(self, comm: Communicator, launch: Launch, wanted: Settings, torch_distributed: bool = True) -> None:
        self.comm, self.launch = comm, launch
        self.peer_queries = PeerQueries(comm)
        self.watchdog = Watchdog(
            comm,
            self.peer_queries,
            socket.gethostname(),
            warn_after=wanted.stall_warn_seconds,
            abort_after=wanted.stall_abort_seconds,
        )
        introductions = allgather_object(comm, (socket.gethostname(), wanted, time.time()))
        hosts = [host for host, _, _ in introductions]
        # Rank 0's, on all ranks: settings decide what is communicated, and timelines are laid side by side.
        _, self.settings, self._epoch = introductions[0]
        mine = hosts[comm.rank]
        local = [rank for rank, host in enumerate(hosts) if host == mine]
        self.local_rank = local.index(comm.rank) if launch.local_rank is None else launch.local_rank
        self.local_size = len(local) if launch.local_size is None else launch.local_size
        self.homogeneous = len({hosts.count(host) for host in hosts}) == 1
        leaders = list(dict.fromkeys(hosts))
        self.cross_rank, self.cross_size = leaders.index(mine), len(leaders)
        self.hosts = tuple(
            tuple(r for r, host in enumerate(hosts) if host == name) for name in leaders
        )  # ranks, by host
        self.levels: tuple[Levels | None] | None = None  # decided once, see `overlap.job.two_levels`
        self.poison = self.settings.poison
        # Ranks meet here at the end, wherever each of them stands in the order of the collectives.
        self.control = _duplicate(comm)
        self.watchdog.watch(self.control)
        self.services: dict[str, Service] = {}  # closed on shutdown while all ranks still answer
        self.issuers: dict[str, Issuer] = {}  # closed once optimizers have finished
        self.participants: list[Participant] = []  # what join() drives; see overlap.horovod.synchronization
        self._adopted: list[Communicator] = []
        self.roster = regrouping.roster()  # where ranks come and go
        self.late = self.roster is not None and self.roster.late  # until this rank is where others are
        self.registry = Registry(self.control, self.peer_queries)
        self.watchdog.meaning = self.registry.meaning
        self.channels = Channels(self.control, self.watchdog.watch, self.registry.abandoned, self._forget)
        failures.install(comm.rank, comm.size, comm.abort, hosts, self.registry.meaning)
        logs.configure(self.settings, comm.rank)
        _share_cores(comm, local, self.local_size)
        if self.settings.timeline:
            self.start_timeline(
                self.settings.timeline, self.settings.timeline_mark_cycles, self.settings.timeline_max_mb
            )
        self.torch_distributed = torch_distributed
        self._default_group = self._make_default_group(torch_distributed)
        if comm.size > 1 and torch.distributed.is_available() and torch.distributed.is_initialized():
            log.info("rank %d: gloo's connections go over %s", comm.rank, interfaces.in_use())
        if self.roster is not None:
            self.roster.watch(self.tear_down)
            self.roster.on_given_up = self._given_up
            self.watchdog.give_up = self.roster.give_up
        self.watchdog.forsaken = agent_gone()
        self.watchdog.connected(
            hosts,
            warn_after=self.settings.stall_warn_seconds,
            abort_after=self.settings.stall_abort_seconds,
        )

    def _make_default_group(self, wanted: bool) -> DefaultGroup | None:
        if self.comm.size == 1 or not torch.distributed.is_available():
            return None
        from overlap.job import default_group

        return default_group.make(self.control, wanted, self.local_rank, self.local_size)

    def end_default_group(self) -> None:
        """Restore torch.distributed as it was before the session."""
        ended, self._default_group = self._default_group, None
        if ended is not None:
            ended.end()

    def start_timeline(self, file_path: str, mark_cycles: bool, max_mb: float) -> None:
        """See :func:`overlap.api.start_timeline`."""
        max_bytes = int(max_mb * 2**20)
        timeline.start(file_path, self.comm.rank, self._epoch, mark_cycles=mark_cycles, max_bytes=max_bytes)

    def _forget(self, topic: str) -> None:
        """All ranks have dropped the optimizer."""
        self.registry.forget(topic)
        for participant in self.participants:
            participant.forget(topic)

    def _given_up(self) -> None:
        where = "\n  ".join(frames(threading.main_thread().ident or 0))
        log.error("rank %d: the others have given this process up, and it ends here:\n  %s", self.comm.rank, where)
        self.comm.abort(1)

    def subset(self, number: int | None) -> Communicator:
        """A new communicator of the ranks that give the same number; of this rank alone where that is None.

        On every rank of the job. It lives as long as the session.
        """
        part = self.control.split(number, self.comm.rank) or NativeCommunicator(comm_core.local())
        self.watchdog.watch(part)
        self.adopt(part)
        return part

    def adopt(self, communicator: Communicator) -> None:
        """Close `communicator` when the session ends, before those adopted earlier. On every rank of it."""
        self._adopted.append(communicator)

    def heed(self) -> None:
        """Raise ``TransportError`` where ranks are lost or others have begun to meet without them. On any rank."""
        if self.roster is not None and self.roster.news:
            raise TransportError(self.roster.news)

    def tear_down(self) -> None:
        """End operations under way on all connections with an error, here and on the peers. On any rank and thread."""
        for communicator in (*self._communicators(), self.control, self.comm):
            communicator.abandon()
        group = self._default_group
        if group is not None:
            group.tear_down()
        for service in list(self.services.values()):
            service.interrupt()
        self.peer_queries.interrupt("ranks are lost")

    def abandon(self) -> None:
        """Let go without a word to other ranks, of which some are lost."""
        self.tear_down()
        self.watchdog.close()
        for service in self.services.values():
            service.abandon()
        self.registry.abandon()
        self.end_default_group()
        self.peer_queries.close()
        timeline.stop()
        failures.remove()
        for communicator in (*self._communicators(), self.control, self.comm):
            communicator.close()

    def _communicators(self) -> list[Communicator]:
        """Those beside the main one and `control`, in the order in which they are let go."""
        return [*reversed(self._adopted), *self.channels.all]

    def close(self) -> None:
        """Wait for the other ranks, finish what is in flight, let go. Questions are answered until all are here."""
        self.watchdog.leaving()
        for service in self.services.values():
            service.close()
        communicators = self._communicators()
        given_up = find_uneven(self.control, communicators)
        try:
            for optimizer in self.registry.optimizers:
                optimizer.finish(given_up)
        finally:  # others may wait for what this rank issues
            for issuer in self.issuers.values():
                issuer.close(given_up)
        if self.issuers:  # ranks may have handed in as much as one another, and not the same
            given_up |= find_uneven(self.control, communicators)
        report(self.comm.rank, communicators, given_up)
        self.control.run(barrier(label="shutdown"))
        self.watchdog.close()
        with last_limit(self.comm, self.settings.stall_warn_seconds, self.settings.stall_abort_seconds):
            self._let_go(communicators, given_up)

    def _let_go(self, communicators: Sequence[Communicator], given_up: Collection[str]) -> None:
        """Once all ranks have come to the end."""
        self.end_default_group()
        self.peer_queries.close()
        timeline.stop()
        failures.remove()
        close_all(communicators, given_up)
        for issuer in self.issuers.values():
            issuer.join()
        self.control.close()
        self.comm.close()
        if self.launch.launcher is not Launcher.TORCHRUN:
            comm_core.finalize()


def _duplicate(comm: Communicator) -> Communicator:
    twin = comm.split(0, comm.rank)
    assert twin is not None, "every rank has the same colour"
    return twin


_session: Session | None = None
_process = 0  # that made it


def _share_cores(comm: Communicator, local: Sequence[int], local_size: int) -> None:
    """Ranks of one host share its cores: with one thread pool each as large as the host they would fight over them.

    `local` are the ranks on hosts of this one's name. On every rank.
    """
    mine = cores.cores()
    everyones = allgather_object(comm, mine)
    if local_size == 1 or os.environ.get("OMP_NUM_THREADS"):
        return
    # Hosts of a job may all have one name; then the launcher alone knows how many ranks this one has.
    beside = [everyones[rank] for rank in local] if len(local) == local_size else [mine] * local_size
    threads = cores.among(mine, beside, cores.limit())
    if threads < torch.get_num_threads():
        torch.set_num_threads(threads)
        log.info("%d ranks share this host: %d thread(s) each (set OMP_NUM_THREADS to choose)", local_size, threads)


def _refuse_helpers() -> None:
    """Raise :class:`LaunchError` in a process that a rank has started by multiprocessing, which runs the script again."""
    rank = os.environ.get(_RANKS_PROCESS, str(os.getpid()))
    # While it runs the script's top level, it does not know of its parent yet; multiprocessing itself looks at this.
    importing = getattr(multiprocessing.current_process(), "_inheriting", False)
    if (importing or multiprocessing.parent_process() is not None) and rank != str(os.getpid()):
        raise LaunchError(
            f"init() was called in a helper process of a rank (process {rank}), such as a DataLoader worker started by "
            "spawn or forkserver: it runs the script's top level again. Put the script's own work, init() included, "
            "under if __name__ == '__main__':"
        )


def _told(environ: Mapping[str, str], meeting: InitMethod | None) -> tuple[Settings, Launch]:
    """What the environment says. What is wrong with it ends a script that does not catch it with one line."""
    try:
        launch, world = detect(environ), None
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        if meeting is not None:
            if world is not None:
                raise LaunchError(
                    f"init_method={meeting.url!r}, but the script has initialised torch.distributed: leave one of them out"
                )
            launch = by_init_method(launch, meeting)
        found = settings.read(environ)
        if found.keep_going and meeting is not None:
            raise LaunchError(
                f"init_method={meeting.url!r}, but ranks that come and go meet at torchrun's: leave it out"
            )
        return found, launch if world is None else adopted(launch, *world)
    except (SettingError, LaunchError) as error:
        failures.say_in_one_line(error, rank_in(environ))
        raise


def init(comm: Any = None, torch_distributed: bool = True, meeting: InitMethod | None = None) -> Session:
    """Join the job that started this process. On every rank; calling it again changes nothing.

    Args:
        comm: an mpi4py communicator, a process group of torch.distributed or an
            ``overlap.transport.communicator.Communicator`` to use instead of what the launcher says.
        torch_distributed: whether torch.distributed gets its default group, over gloo, where it has none: under MPI. The
            group has the ranks of this job, and ends with :func:`shutdown`.

        meeting: where processes meet that no launcher has told.

    A script that has initialised torch.distributed by itself, in processes that no launcher knows (``mp.spawn``), gets that
    world.

    Raises :class:`overlap.job.launch.LaunchError` when launcher and communicator disagree about the size of the job: a job
    never silently trains N copies of rank 0. Raises :class:`overlap.job.settings.SettingError` for an environment variable
    that does not hold what it should. Where the script does not catch it, rank 0 says it in one line, and the others end
    without a word.
    """
    global _session, _process
    if _session is not None:
        return _session
    _refuse_helpers()
    wanted, launch = _told(os.environ, meeting)
    if wanted.keep_going:
        connected = meet(launch, comm, wanted)
        local_rank, local_size = regrouping.place()
        launch = replace(launch, rank=connected.rank, size=connected.size, local_rank=local_rank, local_size=local_size)
    else:
        connected = connect(launch, comm, wanted)
    if comm is None and connected.size != launch.size and launch.launcher is not Launcher.SINGLE:
        size = connected.size
        connected.close()
        raise LaunchError(
            f"{launch.source} promises {launch.size} rank(s), the {connected.backend} communicator has {size}: this "
            "process was probably started by the mpirun of another MPI than the one comm_core was built with, or by "
            f"another launcher inside that job ({BACKEND_VARIABLE}=torch: torchrun)"
        )
    try:
        made = Session(connected, launch, wanted, torch_distributed)
    except TransportError:
        failures.remove()
        connected.abandon()  # the others may wait for this rank
        raise
    _session, _process = made, os.getpid()
    os.environ[_RANKS_PROCESS] = str(_process)
    with contextlib.suppress(KeyError, OSError):
        Path(os.environ.pop(ALONE_VARIABLE)).write_text("init")
    atexit.register(shutdown)
    return _session


def is_initialized() -> bool:
    """Whether :func:`init` was called and :func:`shutdown` was not."""
    return _session is not None


class NotInitialized(ValueError, RuntimeError):
    """The session has not begun, or has ended: :func:`init` was not called, or :func:`shutdown` was."""


def current() -> Session:
    """The session. Raises :class:`NotInitialized` before :func:`init`."""
    if _session is None:
        raise NotInitialized(uninitialized())
    return _session


def uninitialized() -> str:
    """The message for a script that has not called :func:`init`, with the name of the package that it imports."""
    packages = (name for name, module in sys.modules.items() if is_front_door(vars(module)))
    return f"call {next(packages, 'overlap.job.session')}.init() first"


def shutdown() -> None:
    """Leave the job; on every rank (at exit it is called by itself). Waits until all ranks do, still answering them.

    Inside an exception, as in ``finally:``, it is shown first: where other ranks wait for what this one will not do any
    more, they end the job.
    """
    global _session
    if _session is None:
        return
    atexit.unregister(shutdown)
    session, _session = _session, None
    os.environ.pop(_RANKS_PROCESS, None)
    if _process == os.getpid():  # a forked child has no part in what its parent does with the other ranks
        failures.say_what_is_under_way(session.comm.rank, session.comm.size)
        try:
            session.close()
        except TransportError as error:
            if session.roster is None:
                raise
            log.warning("a rank was lost during shutdown(): %s", error)
            session.abandon()
        finally:
            session.end_default_group()
        if session.roster is not None:
            session.roster.end()


def abandon() -> None:
    """End the session, if there is one, without the other ranks, of which some are lost; :func:`init` may follow.

    Not inside ``except``: a traceback has buffers.
    """
    global _session
    session, _session = _session, None
    atexit.unregister(shutdown)
    os.environ.pop(_RANKS_PROCESS, None)
    if session is not None:
        session.abandon()
