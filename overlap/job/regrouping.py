"""Jobs whose ranks come and go: launched with ``DEAR_KEEP_GOING=1``, with an agent of torchrun's for each worker.

Such an agent starts its worker again, and lets those of others alone, if agents have met statically (``--master-addr``;
``--rdzv-backend c10d`` would start all of them again). Agent 0 has the store, and has to live.
"""

from __future__ import annotations

import datetime
import logging
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from comm_core import TransportError
from overlap.job.launch import Launch, Launcher, LaunchError
from overlap.transport.communicator import Communicator

if TYPE_CHECKING:
    from overlap.transport.torch.communicator import Wire
    from overlap.transport.torch.roster import Roster

__all__ = ["RanksChange", "connect", "obstacle", "place", "ranks_change", "roster"]

log = logging.getLogger("dear")

_ATTEMPT = "TORCHELASTIC_RESTART_COUNT"
_PATIENCE = datetime.timedelta(seconds=30)  # a rank may be lost while ranks connect
_HOW = (
    "DEAR_KEEP_GOING=1 needs an agent of torchrun's for each worker: start with 'dearrun --restarts 3 …', or each with "
    "'torchrun --nnodes WORKERS --node-rank RANK --nproc-per-node 1 --master-addr HOST --master-port PORT "
    "--max-restarts 3 …'"
)


class RanksChange(RuntimeError):
    """A rank waits to come in, and all ranks have agreed to meet it now."""


def obstacle(environ: Mapping[str, str], launch: Launch, adopted: bool) -> str | None:
    """The reason why the ranks of this `launch` cannot come and go; None: they can (pure).

    `adopted`: the script has initialised torch.distributed, or gives a communicator.
    """
    if adopted:
        return f"the script has made its own connections; {_HOW}, without init_process_group() and init(comm=…)"
    if launch.launcher is not Launcher.TORCHRUN:
        return f"this process was started by {launch.source}; {_HOW}"
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return f"there is no store of an agent's; {_HOW}"
    if launch.local_size == launch.size > 1:
        return (
            f"one agent has started all {launch.size} workers, and would end them with the first that is lost; {_HOW}"
        )
    return None


_roster: Roster | None = None  # of this process, as long as it lives: sessions come and go


def roster() -> Roster | None:
    """The roster of a job whose ranks come and go; None in any other job."""
    return _roster


def place() -> tuple[int, int]:
    """The local rank and local size at the beginning, which never change, since GPUs are chosen by them."""
    assert _roster is not None
    return _roster.place()


def ranks_change() -> bool:
    """Whether ranks are lost, so that this one has met an error; it may take seconds until that is known."""
    return _roster is not None and _roster.changes()


def connect(launch: Launch, wire: Wire) -> Communicator:
    """Wait for the next ranks that train together, and connect to them. On every one of them.

    A process whose others have all come to the end of training ends here. Raises :class:`LaunchError` where the script
    has ended its session.
    """
    global _roster
    from overlap.transport.torch.communicator import connect_generation
    from overlap.transport.torch.generations import Member
    from overlap.transport.torch.roster import JobOver, Roster, agents_store

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if _roster is None:
        me = Member(launch.rank, int(os.environ.get(_ATTEMPT, "0")))
        _roster = Roster(lambda: agents_store(host, port), me, launch.size)
    if _roster.ended:
        raise LaunchError("with DEAR_KEEP_GOING=1 a process has one session: init() was called after shutdown()")
    while True:
        try:
            rank = _roster.regroup()
        except JobOver as over:
            log.warning("%s; this process ends", over)
            _roster.end()
            sys.exit(0)
        try:
            store = agents_store(host, port, _PATIENCE)
            comm = connect_generation(wire, store, _roster.number, rank, len(_roster.members), _PATIENCE)
            _roster.watch(comm.abandon)  # until the session does
            return comm
        except TransportError as error:
            if not _roster.changes():
                raise
            log.warning("%s while ranks connected; once more: %s", _roster.news, error)
