"""A communicator over plain TCP: ranks find each other through whatever already connects them."""

from __future__ import annotations

import importlib
import json
import secrets
import socket
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
    host: str = "127.0.0.1",
    timeout: float = 300.0,
    silence: float | None = None,
) -> _C.Communicator:
    """A communicator over TCP, moved by a thread that sleeps until the kernel has something for it. On every rank.

    `exchange` is called twice on each: under torchrun anything that gathers bytes through its store, over MPI
    ``exchange_over(comm_core.mpi())``. `host` is the address of this machine, as text, that other ranks connect to, and
    from which this one connects to them. They have `timeout` seconds for it. A machine that has been silent for
    `silence` seconds, while something was expected of it, is lost; None leaves that to whoever watches.

    A connection counts only where it begins with a secret that went through `exchange`; any other is closed.

    Raises, on every rank and with the number of the rank it happened to:
        TransportError: ranks could not connect to each other.
    """
    trouble, listener = None, None
    try:
        listener = _backend().Listener(host, size)
    except _C.Error as error:
        trouble = str(error)
    port = 0 if listener is None else listener.port
    mine = {"host": host, "port": port, "secret": secrets.token_hex(32), "trouble": trouble, "name": socket.gethostname()}
    everybody = [json.loads(message) for message in exchange(json.dumps(mine).encode())]
    if len(everybody) != size:
        raise _C.InvalidUsage(f"tcp: exchange() gave {len(everybody)} messages for {size} ranks")
    _require_none([said["trouble"] for said in everybody])
    communicator = None
    try:
        endpoints = [(said["host"], said["port"]) for said in everybody]
        secret = bytes.fromhex(everybody[0]["secret"])
        communicator = _backend().connect(listener, rank, endpoints, secret, timeout, silence)
    except _C.Error as error:
        trouble = str(error)
    finally:
        if listener is not None:
            listener.close()
    _require_none([json.loads(message) for message in exchange(json.dumps(trouble).encode())])
    assert communicator is not None
    watch_exit(size)
    return communicator


def _require_none(troubles: Sequence[str | None]) -> None:
    for rank, trouble in enumerate(troubles):
        if trouble is not None:
            raise _C.TransportError(f"ranks could not connect to each other, because of rank {rank}: {trouble}")


def _backend() -> Any:
    return importlib.import_module("comm_core._tcp")
