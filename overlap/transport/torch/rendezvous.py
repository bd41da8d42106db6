"""Connects torchrun's workers through the c10d store, in every session and after torchrun restarted them.

The store may outlive sessions and workers, and gloo would find the addresses of connections that are gone. So every
session of every attempt has a corner of its own. The ranks of a session have begun the same ones among themselves, so they
count those alike.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import default_pg_timeout
from torch.distributed.rendezvous import rendezvous

from comm_core import TransportError
from overlap.transport.torch.interfaces import VARIABLE, Address, other_host, own_addresses, refusal, toward
from overlap.transport.torch.variables import Variables

__all__ = [
    "ATTEMPT",
    "ENVIRONMENT",
    "Rendezvous",
    "begin_group",
    "connecting",
    "corner_of",
    "join_world",
    "name_interface",
]

ATTEMPT = "TORCHELASTIC_RESTART_COUNT"  # how often torchrun has started its ranks again; its store stays
_CONNECT = datetime.timedelta(minutes=2)  # for ranks that have all arrived at the store
_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.01, 0.5  # between two looks at whether all have come
_TELL_SECONDS = 1.0
_RETRY_SECONDS = 10.0
_PATIENCE = datetime.timedelta(minutes=5)


ENVIRONMENT = "env://", -1, -1  # an init_method, a rank and their number: all of it is in the environment


def join_world(
    session: int, awaited: Callable[[Sequence[int]], object], init_method: str, rank: int, size: int
) -> Variables:
    """``torch.distributed.init_process_group("gloo")`` that can be called again, and works after a restart.

    On every rank.

    The interface is named to gloo until what is returned is restored. `awaited` hears of the ranks that have not come.
    """
    attempt = os.environ.get(ATTEMPT)
    corner = f"dear/session-{session}" if attempt is None else f"dear/attempt-{attempt}/session-{session}"
    retry_until = time.monotonic() + _RETRY_SECONDS if init_method.startswith("tcp:") and rank != 0 else 0.0
    while True:
        try:
            store, rank, size = next(rendezvous(init_method, rank, size))
            _await_all(PrefixStore(f"{corner}/arrived", store), rank, size, awaited)
            break
        except dist.DistError:  # it was the store of the last session, which rank 0 has just closed
            if time.monotonic() > retry_until:
                raise
            time.sleep(_PAUSE_SECONDS)
    named = name_interface(PrefixStore(f"{corner}/interfaces", store), rank, size)
    try:
        with connecting():
            begin_group(PrefixStore(corner, store), rank, size, _CONNECT)
    except BaseException:
        named.restore()
        raise
    return named


def _await_all(store: Any, rank: int, size: int, awaited: Callable[[Sequence[int]], object]) -> None:
    """For ever: a rank that comes late is no failure of the network. `awaited` hears meanwhile for whom this one waits."""
    store.append("ranks", f"{rank} ")
    if store.add("count", 1) == size:
        store.set("all", "")
    pause, tell_at = _PAUSE_SECONDS, time.monotonic() + _TELL_SECONDS
    while not store.check(["all"]):  # torch logs every wait that runs into its time limit
        if time.monotonic() > tell_at:
            come = {int(word) for word in store.get("ranks").split()}
            awaited([peer for peer in range(size) if peer not in come])
            tell_at = time.monotonic() + _TELL_SECONDS
        time.sleep(pause)
        pause = min(_LONGEST_PAUSE_SECONDS, 1.2 * pause)


def begin_group(store: Any, rank: int, size: int, setup: datetime.timedelta) -> None:
    """Make torch.distributed's default group; `setup` is how long ranks may take to connect, and for nothing else."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=setup)
    set_timeout = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout  # which warns since torch 2.14
    set_timeout(default_pg_timeout)


def name_interface(store: Any, rank: int, size: int) -> Variables:
    """Name gloo the interface by which ranks reach each other, unless the user has. On every rank.

    It is the one by which rank 0's host is reached. On that host itself this may be the loopback, as where its name leads
    to 127.0.1.1; it takes the one by which it reaches a rank of another host.
    """
    master = os.environ.get("MASTER_ADDR") or getattr(_tcp_store(store), "host", None)
    if size == 1:
        return Variables({})
    named = master is None or bool(os.environ.get(VARIABLE))
    one_host = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE", "?")
    found = None if named else toward("127.0.0.1" if one_host else str(master))
    store.set(str(rank), "" if found is None else found.text)  # whatever this rank does: others may wait for it
    if found is not None and found.ip.is_loopback and not one_host:
        found = _toward_others(store, size, found)
    return Variables({} if found is None else {VARIABLE: found.interface})


def _toward_others(store: Any, size: int, found: Address) -> Address | None:
    elsewhere = other_host([store.get(str(peer)).decode() for peer in range(size)])
    return found if elsewhere is None else toward(elsewhere)


@contextlib.contextmanager
def connecting() -> Iterator[None]:
    """A context that turns gloo's connection errors into ``TransportError``, with the interface and a remedy."""
    try:
        yield
    except RuntimeError as error:
        raise TransportError(refusal(os.environ.get(VARIABLE, ""), own_addresses(), error)) from error


def _tcp_store(store: Any) -> Any:
    """What is below prefixes, as far as it can be asked for."""
    below = getattr(store, "_underlying_non_prefix_store", store)
    return below if isinstance(below, TCPStore) else None


class Rendezvous:
    """A meeting place: connections to `store` for the ranks that meet in one `corner` of it (:func:`corner_of`).

    `patience` is how long they may take to connect to each other. `attempts`: processes of several attempts meet there.
    """

    def __init__(
        self, store: Any, corner: str, patience: datetime.timedelta = _PATIENCE, *, attempts: bool = False
    ) -> None:
        self._store, self._corner, self.patience = store, corner, patience
        self._attempt = "" if attempts else f"attempt-{os.environ.get(ATTEMPT, 0)}/"

    def connect(self, prefix: str) -> Any:
        """A store by a connection of its own, so that a blocking wait on it holds up nobody else."""
        if hasattr(self._store, "clone"):
            return PrefixStore(f"{self._corner}/{prefix}", self._store.clone())
        # Before torch 2.8. What the script's store puts before its keys cannot be asked for; torchrun's store, which
        # outlives the workers, is told apart by their attempts.
        below = _tcp_store(self._store)
        if below is None:
            return PrefixStore(f"{self._corner}/{prefix}", self._store)
        client = TCPStore(below.host, below.port, timeout=self.patience, wait_for_workers=False)
        return PrefixStore(f"{self._attempt}{self._corner}/{prefix}", client)


def corner_of(session: int, ranks: Sequence[int] | None = None) -> str:
    """The part of the store for a session, numbered from 0, of all ranks, or of those in `ranks`."""
    return f"dear/session-{session}" if ranks is None else f"dear/ranks-{'-'.join(map(str, ranks))}/session-{session}"
