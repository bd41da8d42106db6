"""A communicator over plain TCP: ranks find each other through whatever already connects them."""

from __future__ import annotations

import importlib
import ipaddress
import json
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from comm_core import _C
from comm_core.launch import watch_exit

__all__ = ["tcp"]

#: Gives every rank's bytes, in rank order, to every rank.
Exchange = Callable[[bytes], Sequence[bytes]]


def tcp(
    rank: int,
    size: int,
    exchange: Exchange,
    *,
    hosts: Sequence[str] = ("127.0.0.1",),
    timeout: float = 300.0,
    silence: float | None = None,
) -> _C.Communicator:
    """A communicator over TCP, moved by a thread that sleeps until the kernel has something for it. On every rank.

    `exchange` is called twice on each: under torchrun anything that gathers bytes through its store, over MPI
    ``exchange_over(comm_core.mpi())``. `hosts` are addresses of this machine, as text, one of a family at most: other
    ranks connect to the one of the first family, in rank 0's order, that all ranks have, and from there this one connects
    to them. They have `timeout` seconds for it. A machine that has been silent for `silence` seconds, while something was
    expected of it, is lost; None leaves that to whoever watches.

    A connection counts only where it begins with a secret that went through `exchange`; any other is closed.

    Raises, on every rank and with the number of the rank it happened to:
        TransportError: ranks could not connect to each other.
    """
    trouble: str | None = None
    listeners: dict[int, tuple[str, Any]] = {}
    try:
        listeners = {ipaddress.ip_address(host).version: (host, _backend().Listener(host, size)) for host in hosts}
    except (_C.Error, ValueError) as error:
        trouble = str(error)
    places = {version: (host, listener.port) for version, (host, listener) in listeners.items()}
    mine = {"places": places, "secret": secrets.token_hex(32), "trouble": trouble}
    everybody = [json.loads(message) for message in exchange(json.dumps(mine).encode())]
    if len(everybody) != size:
        raise _C.InvalidUsage(f"tcp: exchange() gave {len(everybody)} messages for {size} ranks")
    _require_none([said["trouble"] for said in everybody])
    version = common_family([list(said["places"]) for said in everybody])
    if version is None:
        shown = [", ".join(host for host, _ in said["places"].values()) for said in everybody]
        raise _C.TransportError(f"ranks have no family of addresses in common: {'; '.join(shown)}")
    communicator = None
    try:
        endpoints = [tuple(said["places"][version]) for said in everybody]
        listener = listeners[int(version)][1]
        secret = bytes.fromhex(everybody[0]["secret"])
        communicator = _backend().connect(listener, rank, endpoints, secret, timeout, silence)
    except _C.Error as error:
        trouble = str(error)
    finally:
        for _, listener in listeners.values():
            listener.close()
    _require_none([json.loads(message) for message in exchange(json.dumps(trouble).encode())])
    assert communicator is not None
    watch_exit(size)
    return communicator


def common_family(families: Sequence[Sequence[str]]) -> str | None:
    """The first of rank 0's that every rank has, of families of addresses by rank; None: there is none (pure)."""
    return next((family for family in families[0] if all(family in others for others in families)), None)


def _require_none(troubles: Sequence[str | None]) -> None:
    for rank, trouble in enumerate(troubles):
        if trouble is not None:
            raise _C.TransportError(f"rank {rank}: {trouble}")


def _backend() -> Any:
    return importlib.import_module("comm_core._tcp")
