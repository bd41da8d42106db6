"""How torchrun's workers find each other: in the c10d store, in every session and after torchrun restarted them.

The store may outlive sessions and workers, and gloo would find the addresses of connections that are gone. So every
session of every attempt has a corner of its own. The ranks of a session have begun the same ones among themselves, so they
count those alike.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.rendezvous import rendezvous

__all__ = ["Rendezvous", "join_world"]

_ATTEMPT = "TORCHELASTIC_RESTART_COUNT"


def join_world(session: int) -> None:
    """``torch.distributed.init_process_group("gloo")`` that works again, and after a restart. On every rank."""
    attempt = os.environ.get(_ATTEMPT)
    if attempt is None:
        dist.init_process_group("gloo")
        return
    store, rank, size = next(rendezvous("env://"))
    corner = PrefixStore(f"dear/attempt-{attempt}/session-{session}", store)
    dist.init_process_group("gloo", store=corner, rank=rank, world_size=size)


class Rendezvous:
    """Connections to `store` for the ranks of one session, numbered from 0: all, or those in `ranks`."""

    def __init__(self, store: Any, session: int, ranks: Sequence[int] | None = None) -> None:
        self._store, self._corner = store, f"dear/session-{session}"
        if ranks is not None:  # others may have a session at the same time
            self._corner = f"dear/ranks-{'-'.join(map(str, ranks))}/session-{session}"

    def connect(self, prefix: str) -> Any:
        """A store by a connection of its own, so that a blocking wait on it holds up nobody else."""
        if hasattr(self._store, "clone"):
            return PrefixStore(f"{self._corner}/{prefix}", self._store.clone())
        # Before torch 2.8. What the script's store puts before its keys cannot be asked for; torchrun's store, which
        # outlives the workers, is told apart by their attempts.
        below = getattr(self._store, "_underlying_non_prefix_store", self._store)
        if not isinstance(below, TCPStore):
            return PrefixStore(f"{self._corner}/{prefix}", self._store)
        client = TCPStore(below.host, below.port, wait_for_workers=False)
        return PrefixStore(f"attempt-{os.environ.get(_ATTEMPT, 0)}/{self._corner}/{prefix}", client)
