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
    sockets: int = 1,
    apart: bool = False,
    timeout: float = 300.0,
    silence: float | None = None,
) -> _C.Communicator:
    """A communicator over TCP, moved by a thread that sleeps until the kernel has something for it. On every rank.

    `exchange` is called twice on each: under torchrun anything that gathers bytes through its store, over MPI
    ``exchange_over(comm_core.mpi())``. `hosts` are addresses of this machine, as text: other ranks connect to those of
    the first family, in rank 0's order, that all ranks have, and from there this one connects to them. They have
    `timeout` seconds for it.

    Ranks of two machines share `sockets` connections, or as many as the rank that wants the fewest, and at least one for
    each address. Connections take turns among the addresses: the first of every rank, the second, and so on; where a rank
    has fewer, the rest of the others' are left out. Processes of one machine copy from each other's memory, unless they
    are to be `apart`. A machine that has been silent for `silence` seconds, while something was expected of it, is lost;
    None leaves that to whoever watches.

    A connection counts only where it begins with a secret that went through `exchange`; any other is closed.

    Raises, on every rank and with the number of the rank it happened to:
        TransportError: ranks could not connect to each other.
    """
    trouble: str | None = None
    listeners: dict[int, list[tuple[str, Any]]] = {}
    try:
        if sockets < 1:
            raise ValueError(f"sockets should be at least 1 and is {sockets}")
        for host in hosts:
            of_family = listeners.setdefault(ipaddress.ip_address(host).version, [])
            of_family.append((host, _backend().Listener(host, size * max(sockets, len(hosts)))))
    except Exception as error:  # whatever it is: the others wait for this rank in exchange()
        trouble = _described(error)
    places = {version: [(host, listener.port) for host, listener in found] for version, found in listeners.items()}
    mine = {"places": places, "sockets": sockets, "secret": secrets.token_hex(32), "trouble": trouble}
    everybody = [json.loads(message) for message in exchange(json.dumps(mine).encode())]
    if len(everybody) != size:
        raise _C.InvalidUsage(f"tcp: exchange() gave {len(everybody)} messages for {size} ranks")
    _require_none([said["trouble"] for said in everybody])
    version = common_family([list(said["places"]) for said in everybody])
    if version is None:
        shown = [", ".join(host for found in said["places"].values() for host, _ in found) for said in everybody]
        raise _C.TransportError(f"ranks have no family of addresses in common: {'; '.join(shown)}")
    # As many addresses on every rank: the first of each lead to each other, and so on.
    fewest = min(len(said["places"][version]) for said in everybody)
    endpoints = [[(str(host), int(port)) for host, port in said["places"][version][:fewest]] for said in everybody]
    shared = max(min(said["sockets"] for said in everybody), fewest)
    communicator = None
    try:
        listening = [listener for _, listener in listeners[int(version)][:fewest]]
        secret = bytes.fromhex(everybody[0]["secret"])
        communicator = _backend().connect(listening, rank, endpoints, shared, apart, secret, timeout, silence)
    except Exception as error:
        trouble = _described(error)
    finally:
        for _, listener in (one for found in listeners.values() for one in found):
            listener.close()
    _require_none([json.loads(message) for message in exchange(json.dumps(trouble).encode())])
    assert communicator is not None
    watch_exit(size)
    return communicator


def common_family(families: Sequence[Sequence[str]]) -> str | None:
    """The first of rank 0's that every rank has, of families of addresses by rank; None: there is none (pure)."""
    return next((family for family in families[0] if all(family in others for others in families)), None)


def _described(error: Exception) -> str:
    return str(error) if isinstance(error, (_C.Error, ValueError)) else f"{type(error).__name__}: {error}"


def _require_none(troubles: Sequence[str | None]) -> None:
    for rank, trouble in enumerate(troubles):
        if trouble is not None:
            raise _C.TransportError(f"rank {rank}: {trouble}")


def _backend() -> Any:
    return importlib.import_module("comm_core._tcp")
