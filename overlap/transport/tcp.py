"""The communicator of ranks that have found each other without MPI: tensors over comm_core's own connections."""

from __future__ import annotations

import datetime
import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import comm_core
from overlap.transport.forks import Origin
from overlap.transport.native import NativeCommunicator

__all__ = ["TcpCommunicator", "TcpOptions", "connect_over"]

# Several connections get past what a network gives a single one, and what is lost on one does not hold up the others; on
# emulated links four were as fast as one at 1 Gbit/s and took a fifth less at 10. Each rank has open files for all.
_SOCKETS, _MOST_FILES = 4, 512
# Of the time to connect: who is late is told to those who wait in the store before they give up.
_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class TcpOptions:
    """Of the connections of a job."""

    silence: float | None = None
    """Seconds after which a silent host is lost; None: for ever."""
    sockets: int = 0
    """Connections between two ranks of different hosts; 0: four, and fewer in jobs of more than 128 ranks."""

    def arguments(self, size: int, timeout: float) -> dict[str, Any]:
        """For :func:`comm_core.tcp`, where `size` ranks may take `timeout` seconds to connect (pure)."""
        sockets = self.sockets or max(1, min(_SOCKETS, _MOST_FILES // size))
        return {"silence": self.silence, "sockets": sockets, "timeout": timeout}


class TcpCommunicator(NativeCommunicator):
    """Over `core`, a ``comm_core.tcp()``; `end` is called once it is closed."""

    def __init__(self, core: Any, end: Callable[[], object] = bool) -> None:
        super().__init__(core)
        self._end, self._origin = end, Origin()

    def abort(self, code: int) -> None:
        os._exit(code)  # whoever started the job ends the other ranks, who hear of it by their connections

    def close(self) -> None:
        super().close()
        if self._origin.elsewhere:
            return
        end, self._end = self._end, bool
        end()


def connect_over(
    store: Any, rank: int, size: int, hosts: Sequence[str], patience: datetime.timedelta, options: TcpOptions
) -> Any:
    """``comm_core.tcp()`` for ranks that share a `store` of torch.distributed. On every rank.

    `hosts` are addresses of this host; ranks may take `patience` to connect.
    """
    rounds = itertools.count()

    def exchange(mine: bytes) -> Sequence[bytes]:
        number = next(rounds)
        keys = [f"{number}/{peer}" for peer in range(size)]
        store.set(keys[rank], mine)
        store.wait(keys, patience)
        return [bytes(store.get(key)) for key in keys]

    return comm_core.tcp(
        rank, size, exchange, hosts=hosts, **options.arguments(size, _SHARE * patience.total_seconds())
    )
