"""The communicator of a job that torchrun started: tensors over comm_core's own connections, without MPI."""

from __future__ import annotations

import datetime
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

import comm_core
from overlap.transport.native import NativeCommunicator

__all__ = ["TcpCommunicator", "exchange_through"]

_STEP = datetime.timedelta(minutes=5)


class TcpCommunicator(NativeCommunicator):
    """Over `core`; `end` is called once it is closed."""

    def __init__(self, core: Any, end: Callable[[], object] = bool) -> None:
        super().__init__(core)
        self._end = end

    def abort(self, code: int) -> None:
        os._exit(code)  # torchrun ends the other ranks

    def close(self) -> None:
        super().close()
        end, self._end = self._end, bool
        end()


def exchange_through(store: Any, rank: int, size: int, patience: datetime.timedelta = _STEP) -> Callable[[bytes], list[bytes]]:
    """An exchange for :func:`comm_core.tcp`: every rank's bytes, through a store of torch.distributed."""
    rounds = itertools.count()

    def exchange(mine: bytes) -> Sequence[bytes]:
        number = next(rounds)
        keys = [f"{number}/{peer}" for peer in range(size)]
        store.set(keys[rank], mine)
        store.wait(keys, patience)
        return [bytes(store.get(key)) for key in keys]

    return exchange


def connect_tcp(store: Any, rank: int, size: int, host: str, patience: datetime.timedelta) -> Any:
    return comm_core.tcp(rank, size, exchange_through(store, rank, size, patience), host=host, timeout=patience.total_seconds())
