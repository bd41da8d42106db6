"""Makes the groups that torch asks for: the default group's ranks connect, and the others use those connections."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore

import comm_core
from dear.backend.group import Group, Place
from dear.backend.watch import Watch
from overlap.job import settings
from overlap.transport.native import NativeCommunicator
from overlap.transport.tcp import TcpCommunicator, TcpOptions, connect_over
from overlap.transport.torch.interfaces import listening
from overlap.transport.torch.rendezvous import ATTEMPT, connecting, name_interface

__all__ = ["create"]

_CONNECT_SECONDS = 60.0  # for ranks that have all come to the store; operations have their own limit


class _World:
    """The default group, and how many groups of each name were made since. Its ranks count the groups of theirs alike."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.group: Group | None = None  # None: it is not ours
        self.watch: Watch | None = None  # None: a rank alone
        self._made: Counter[str] = Counter()

    def unique(self, name: str) -> str:
        """A name that no other group has, of those whose connections one store has known."""
        self._made[name] += 1
        # A torchrun that has started its ranks again keeps its store, with what they said before.
        attempt = os.environ.get(ATTEMPT, "0")
        return f"{name}/{attempt}.{self.number}.{self._made[name]}"


_world = _World(0)


def create(options: Any, _backend_options: Any) -> Group:
    """The group that torch asks for; it calls this on every rank of it.

    Raises ``TransportError`` where the ranks of the first one cannot connect.
    """
    global _world
    name, store = str(options.group_id), options.store
    rank, size, seconds = options.group_rank, options.group_size, options.timeout.total_seconds()
    if options.global_ranks_in_group:
        ranks = list(options.global_ranks_in_group)
        whole = _world.group
        if whole is None or whole.closed:  # the default group is over another backend
            unique = _world.unique(name)
            return Group(_connected(store, rank, size, unique), Place(store, ranks, name), seconds, None, _part)
        return _part(whole, ranks, store, name, seconds)
    _world = _World(_world.number + 1)
    comm = _connected(store, rank, size, _world.unique(name))
    _world.watch = None if size == 1 else Watch(comm)
    _world.group = Group(comm, Place(store, range(size), name), seconds, _world.watch, _part)
    return _world.group


def _part(whole: Group, ranks: Sequence[int], store: Any, name: str, seconds: float) -> Group:
    """The group of some `ranks` of `whole`. On every one of them."""
    unique = _world.unique(name)
    comm = whole.comm.part(ranks, unique)
    comm.name = unique
    of_default = [whole.ranks[rank] for rank in ranks]
    return Group(comm, Place(store, of_default, name), seconds, _world.watch if len(ranks) > 1 else None, _part)


def _connected(store: Any, rank: int, size: int, unique: str) -> NativeCommunicator:
    if size == 1:
        comm = NativeCommunicator(comm_core.local())
    else:
        corner = PrefixStore(f"dear/{unique}", store)
        wanted = settings.read(os.environ)
        tcp = TcpOptions(wanted.stall_abort_seconds or None, wanted.tcp_sockets)
        named = name_interface(PrefixStore("interfaces", corner), rank, size)
        try:
            with connecting():
                meeting = PrefixStore("tcp", corner)
                patience = timedelta(seconds=_CONNECT_SECONDS)
                comm = TcpCommunicator(connect_over(meeting, rank, size, listening(), patience, tcp))
        finally:
            named.restore()
    comm.name = unique
    return comm
