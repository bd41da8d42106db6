"""Connects the ranks of a job that torchrun started, or of a process group that the script has made."""

from __future__ import annotations

import datetime
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from comm_core import TransportError
from overlap.transport.communicator import Communicator
from overlap.transport.forks import Origin
from overlap.transport.tcp import TcpCommunicator, TcpOptions, connect_over
from overlap.transport.torch.gloo import GlooCommunicator
from overlap.transport.torch.interfaces import listening
from overlap.transport.torch.rendezvous import (
    ENVIRONMENT,
    Rendezvous,
    connecting,
    corner_of,
    join_world,
    name_interface,
)
from overlap.transport.torch.variables import Variables

__all__ = ["Wire", "connect", "connect_generation"]

_sessions: defaultdict[tuple[int, ...] | None, Iterator[int]] = defaultdict(itertools.count)  # by ranks; None: all


@dataclass(frozen=True, slots=True)
class Wire:
    """What moves the bytes between ranks."""

    gloo: bool = False  # torch.distributed's, in place of comm_core's own connections
    tcp: TcpOptions = field(default_factory=TcpOptions)


def connect(
    wire: Wire,
    group: dist.ProcessGroup | None = None,
    awaited: Callable[[Sequence[int]], object] = bool,
    place: tuple[str, int, int] = ENVIRONMENT,
) -> Communicator:
    """Connect all ranks of torch.distributed's world, or those in `group`. On every rank of it.

    Joins their world first where the script did not: at `place`, an ``init_method`` of torch.distributed with this rank
    and their number; -1: the environment says. `awaited` hears now and then of the ranks that have not come.
    """
    ranks = None if group is None else tuple(dist.get_process_group_ranks(group))
    session = next(_sessions[ranks])
    created = not dist.is_initialized()
    named = join_world(session, awaited, *place) if created else None
    meeting = Rendezvous(dist.distributed_c10d._get_default_store(), corner_of(session, ranks))
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if named is None:
        named = name_interface(meeting.connect("interfaces"), rank, size)
    return _connect(wire, meeting, rank, size, named, owns_world=created)


def connect_generation(
    wire: Wire, store: Any, number: int, rank: int, size: int, patience: datetime.timedelta
) -> Communicator:
    """Connect generation `number` of a job whose ranks come and go, as `rank` of `size`. On every rank of it.

    `store` outlives them; ranks may take `patience` to connect. torch.distributed is left alone.
    """
    meeting = Rendezvous(store, f"dear/generation-{number}", patience, attempts=True)
    try:
        named = name_interface(meeting.connect("interfaces"), rank, size)
    except RuntimeError as error:  # a rank was lost before it had said where it is
        raise TransportError(f"generation {number}: {error}") from error
    try:
        return _connect(wire, meeting, rank, size, named, owns_world=False)
    except TransportError:
        named.restore()
        raise


def _connect(
    wire: Wire, meeting: Rendezvous, rank: int, size: int, named: Variables, *, owns_world: bool
) -> Communicator:
    origin = Origin()

    def end() -> None:
        if origin.elsewhere:
            return
        if owns_world and dist.is_initialized():
            dist.destroy_process_group()
        named.restore()

    if wire.gloo:
        return GlooCommunicator(meeting, rank, size, end=end)
    with connecting():
        core = connect_over(meeting.connect("tcp"), rank, size, listening(), meeting.patience, wire.tcp)
    return TcpCommunicator(core, end)
