"""Small Python objects between ranks: how decisions are agreed and structures are compared."""

from __future__ import annotations

import pickle
from typing import Any, TypeVar

import torch

from overlap.communicator import Communicator

__all__ = ["agree", "allgather_object", "broadcast_object"]

T = TypeVar("T")


def _as_bytes(obj: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)


def broadcast_object(comm: Communicator, obj: T, root: int = 0) -> T:
    """The root's object on every rank (pickled). Call on all ranks of `comm`."""
    if comm.size == 1:
        return obj
    payload = _as_bytes(obj) if comm.rank == root else torch.empty(0, dtype=torch.uint8, device="cpu")
    length = torch.tensor([payload.numel()], dtype=torch.int64, device="cpu")
    comm.broadcast(length, root)
    if comm.rank != root:
        payload = torch.empty(int(length), dtype=torch.uint8, device="cpu")
    comm.broadcast(payload, root)
    return obj if comm.rank == root else pickle.loads(payload.numpy().tobytes())


def allgather_object(comm: Communicator, obj: T) -> list[T]:
    """Every rank's object, in rank order, on every rank (pickled). Call on all ranks of `comm`."""
    if comm.size == 1:
        return [obj]
    payload = _as_bytes(obj)
    counts = comm.all_gather_counts(payload.numel())
    gathered = torch.empty(sum(counts), dtype=torch.uint8, device="cpu")
    comm.all_gather(payload, gathered, counts=counts)
    return [pickle.loads(part.numpy().tobytes()) for part in gathered.split(counts)]


def agree(comm: Communicator, value: T) -> T:
    """Rank 0's value, on every rank: the one way in which something measured may decide what is communicated.

    Call it on all ranks or on none.
    """
    return broadcast_object(comm, value, 0)
