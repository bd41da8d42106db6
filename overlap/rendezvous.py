"""How torchrun's workers find each other, also after torchrun restarted them."""

from __future__ import annotations

import os

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

__all__ = ["join_world"]


def join_world() -> None:
    """``torch.distributed.init_process_group("gloo")`` that works after a restart as well. On every rank.

    ``torchrun --max-restarts`` starts the workers anew and the store that they meet in stays, so that gloo would find
    the addresses of workers that are gone. Every attempt gets a corner of its own.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    if attempt is None:
        dist.init_process_group("gloo")
        return
    store, rank, size = next(rendezvous("env://"))
    corner = PrefixStore(f"dear/attempt-{attempt}", store)
    dist.init_process_group("gloo", store=corner, rank=rank, world_size=size)
