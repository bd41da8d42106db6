"""Small Python objects between ranks: how decisions are agreed and structures are compared."""

from __future__ import annotations

import pickle
import struct
from typing import Any, TypeVar

import torch

from overlap.communicator import Communicator

__all__ = ["agree", "allgather_object", "broadcast_object"]

T = TypeVar("T")

_LENGTH = struct.Struct("<q")
_FRAME = 1024  # bytes that travel whatever the object: its length, and as much of it as there is room for


def _framed(obj: Any) -> tuple[torch.Tensor, bytes]:
    """The first message about an object, and what it had no room for: most objects need no second one."""
    pickled = pickle.dumps(obj)
    room = _FRAME - _LENGTH.size
    frame = bytearray(_LENGTH.pack(len(pickled)) + pickled[:room]).ljust(_FRAME, b"\0")
    return torch.frombuffer(frame, dtype=torch.uint8), pickled[room:]


def _rest(frame: bytes) -> int:
    """How many bytes the frame had no room for."""
    return max(0, _LENGTH.unpack_from(frame)[0] + _LENGTH.size - _FRAME)


def _parsed(frame: bytes, rest: bytes) -> Any:
    length = _LENGTH.unpack_from(frame)[0]
    return pickle.loads((frame[_LENGTH.size :] + rest)[:length])


def _as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else _empty(0)


def _empty(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.uint8, device="cpu")


def broadcast_object(comm: Communicator, obj: T, root: int = 0) -> T:
    """The root's object on every rank (pickled). Call on all ranks of `comm`."""
    if comm.size == 1:
        return obj
    first, left = _framed(obj) if comm.rank == root else (_empty(_FRAME), b"")
    comm.broadcast(first, root)
    frame = first.numpy().tobytes()
    second = _as_tensor(left) if comm.rank == root else _empty(_rest(frame))
    if _rest(frame) > 0:
        comm.broadcast(second, root)
    return obj if comm.rank == root else _parsed(frame, second.numpy().tobytes())


def allgather_object(comm: Communicator, obj: T) -> list[T]:
    """Every rank's object, in rank order, on every rank (pickled). Call on all ranks of `comm`."""
    if comm.size == 1:
        return [obj]
    first, left = _framed(obj)
    firsts = _empty(comm.size * _FRAME)
    comm.all_gather(first, firsts)
    frames = [frame.numpy().tobytes() for frame in firsts.split(_FRAME)]
    counts = [_rest(frame) for frame in frames]
    rests = _empty(sum(counts))
    if sum(counts) > 0:
        comm.all_gather(_as_tensor(left), rests, counts=counts)
    parts = zip(frames, rests.split(counts), strict=True)
    return [_parsed(frame, rest.numpy().tobytes()) for frame, rest in parts]


def agree(comm: Communicator, value: T) -> T:
    """Rank 0's value, on every rank: the one way in which something measured may decide what is communicated.

    Call it on all ranks or on none.
    """
    return broadcast_object(comm, value, 0)
