"""The communicator of ranks that have found each other without MPI: tensors over comm_core's own connections."""

from __future__ import annotations

import datetime
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

import comm_core
from overlap.transport.forks import Origin
from overlap.transport.native import NativeCommunicator

__all__ = ["TcpCommunicator", "connect_over", "exchange_through"]


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
    store: Any, rank: int, size: int, hosts: Sequence[str], patience: datetime.timedelta, silence: float | None
) -> Any:
    """``comm_core.tcp()`` for ranks that share a `store` of torch.distributed. On every rank.

    `hosts` are addresses of this host, `silence` is as there; ranks may take `patience` to connect.
    """
    exchange = exchange_through(store, rank, size, patience)
    return comm_core.tcp(rank, size, exchange, hosts=hosts, timeout=patience.total_seconds(), silence=silence)


def exchange_through(
    store: Any, rank: int, size: int, patience: datetime.timedelta
) -> Callable[[bytes], Sequence[bytes]]:
    """An exchange for :func:`comm_core.tcp` through a `store` of torch.distributed, which waits `patience` for ranks."""
    rounds = itertools.count()

    def exchange(mine: bytes) -> Sequence[bytes]:
        number = next(rounds)
        keys = [f"{number}/{peer}" for peer in range(size)]
        store.set(keys[rank], mine)
        store.wait(keys, patience)
        return [bytes(store.get(key)) for key in keys]

    return exchange
