"""A barrier through the store of a group, which tells who is missing."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from comm_core import TransportError

__all__ = ["monitored_barrier"]

_ANSWER_SECONDS = 30.0  # which others wait for rank 0 beyond its own limit


def monitored_barrier(store: Any, rank: int, size: int, seconds: float, name: str, wait_all_ranks: bool) -> None:
    """Wait until all ranks have come to one corner of a `store`; `seconds` at most.

    Raises ``TransportError`` on every rank that has come, with the ranks that have not: the first of them, or all with
    `wait_all_ranks`.
    """
    if rank:
        store.set(str(rank), "")
        _await(store, "verdict", seconds + _ANSWER_SECONDS)
        missing = store.get("verdict").decode()
    else:
        until = time.monotonic() + seconds
        late: list[str] = []
        for peer in range(1, size):
            if not late or wait_all_ranks:
                late += [] if _has(store, str(peer), until - time.monotonic()) else [str(peer)]
        missing = ", ".join(late)
        store.set("verdict", missing)
    if missing:
        raise TransportError(
            f"monitored_barrier of {name}: rank(s) {missing} of {size} have not come within {seconds:g} s"
        )


def _has(store: Any, key: str, seconds: float) -> bool:
    if store.check([key]):
        return True
    try:
        _await(store, key, seconds)
    except RuntimeError:  # torch has no type of its own for it in all versions
        return bool(store.check([key]))
    return True


def _await(store: Any, key: str, seconds: float) -> None:
    store.wait([key], timedelta(seconds=max(0.001, seconds)))
