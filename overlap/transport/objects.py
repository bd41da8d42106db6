"""Sends small Python objects between ranks, by which decisions are agreed and structures compared."""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch

from overlap.transport.communicator import Communicator
from overlap.transport.operation import all_gather, broadcast

__all__ = [
    "NotSent",
    "SignatureMismatch",
    "agree",
    "allgather_made",
    "allgather_object",
    "broadcast_made",
    "broadcast_object",
    "compare",
    "is_picklable",
    "loads",
]

T = TypeVar("T")

_LENGTH = struct.Struct("<q")
_FRAME = 1024  # bytes that travel whatever the object: its length, and as much of it as there is room for
_SIMPLE = (bool, int, float, str, type(None))


class NotSent(RuntimeError):
    """A rank could not make, or pickle, what it was to send. Every rank raises it: the others do not wait in vain."""

    def __init__(self, sender: int, reason: str) -> None:
        super().__init__(f"rank {sender} could not send an object: {reason}")
        self.sender, self.reason = sender, reason


def is_picklable(value: Any) -> bool:
    """Whether `value` can be sent."""
    if isinstance(value, _SIMPLE):
        return True
    try:
        pickle.dumps(value)
    except Exception:
        return False
    return True


class _Unpickler(pickle.Unpickler):
    """Python's unpickler without a warning of torch before 2.6 for each tensor."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) == ("torch.storage", "_load_from_bytes"):
            return _storage_from_bytes
        return super().find_class(module_name, global_name)


def _storage_from_bytes(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), weights_only=False)


def loads(content: bytes) -> Any:
    """The object that was pickled as `content`."""
    return _Unpickler(io.BytesIO(content)).load()


class _Parcel(Generic[T]):
    """What `make` gives, pickled; or the reason why there is nothing, to be sent in its place."""

    def __init__(self, make: Callable[[], T]) -> None:
        self.failure: Exception | None = None
        try:
            self.content = make()
            pickled = pickle.dumps(self.content)
            length = len(pickled)
        except Exception as error:
            self.failure = error
            pickled = f"{type(error).__name__}: {error}".encode()
            length = -len(pickled)  # so the others can tell
        room = _FRAME - _LENGTH.size
        frame = bytearray(_LENGTH.pack(length) + pickled[:room]).ljust(_FRAME, b"\0")
        # The first message, and what it had no room for: most objects need no second one.
        self.first, self.left = torch.frombuffer(frame, dtype=torch.uint8), pickled[room:]


def _rest(frame: bytes) -> int:
    """How many bytes the frame had no room for."""
    return max(0, abs(_LENGTH.unpack_from(frame)[0]) + _LENGTH.size - _FRAME)


def _parsed(frame: bytes, rest: bytes, sender: int, failure: Exception | None) -> Any:
    """The object of rank `sender`. Raises :class:`NotSent` where it has none; `failure` is why, if this is that rank."""
    length = _LENGTH.unpack_from(frame)[0]
    content = (frame[_LENGTH.size :] + rest)[: abs(length)]
    if length < 0:
        raise NotSent(sender, content.decode(errors="replace")) from failure
    return loads(content)


def _as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else _empty(0)


def _empty(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.uint8, device="cpu")


def broadcast_object(comm: Communicator, obj: T, root: int = 0) -> T:
    """The root's object on every rank (pickled). Call on all ranks of `comm`.

    Raises :class:`NotSent` on all of them where it cannot be pickled.
    """
    return broadcast_made(comm, lambda: obj, root)


def broadcast_made(comm: Communicator, make: Callable[[], T], root: int = 0) -> T:
    """What `make` returns on the root, on every rank (pickled); the others do not call it. Call on all ranks of `comm`.

    Raises :class:`NotSent` on all of them where `make` fails or its result cannot be pickled.
    """
    if comm.size == 1:
        return make()
    parcel = _Parcel(make) if comm.rank == root else None
    first = _empty(_FRAME) if parcel is None else parcel.first
    comm.run(broadcast(first, root))
    frame = first.numpy().tobytes()
    second = _empty(_rest(frame)) if parcel is None else _as_tensor(parcel.left)
    if _rest(frame) > 0:
        comm.run(broadcast(second, root))
    if parcel is not None and parcel.failure is None:
        return parcel.content
    received: T = _parsed(frame, second.numpy().tobytes(), root, None if parcel is None else parcel.failure)
    return received


def allgather_object(comm: Communicator, obj: T) -> list[T]:
    """Every rank's object, in rank order, on every rank (pickled). Call on all ranks of `comm`.

    Raises :class:`NotSent` on all of them where one of the objects cannot be pickled.
    """
    return allgather_made(comm, lambda: obj)


def allgather_made(comm: Communicator, make: Callable[[], T]) -> list[T]:
    """What `make` returns on every rank, in rank order, on every rank (pickled). Call on all ranks of `comm`.

    Raises :class:`NotSent` on all of them where `make` fails on one, or its result cannot be pickled.
    """
    if comm.size == 1:
        return [make()]
    parcel = _Parcel(make)
    firsts = _empty(comm.size * _FRAME)
    comm.run(all_gather(parcel.first, firsts))
    frames = [frame.numpy().tobytes() for frame in firsts.split(_FRAME)]
    counts = [_rest(frame) for frame in frames]
    rests = _empty(sum(counts))
    if sum(counts) > 0:
        comm.run(all_gather(_as_tensor(parcel.left), rests, counts=counts))
    parts = zip(frames, rests.split(counts), strict=True)
    return [
        _parsed(frame, rest.numpy().tobytes(), sender, parcel.failure if sender == comm.rank else None)
        for sender, (frame, rest) in enumerate(parts)
    ]


def agree(comm: Communicator, value: T) -> T:
    """Rank 0's value, on every rank: the only way by which a measurement may decide what is communicated.

    Call it on all ranks or on none.
    """
    return broadcast_object(comm, value, 0)


class SignatureMismatch(ValueError):
    """Model, optimizer or arguments differ between ranks."""


def compare(what: str, signatures: Sequence[Sequence[str]]) -> None:
    """Raise where a rank's lines differ from rank 0's; `signatures` hold every rank's, in rank order (pure)."""
    reference = signatures[0]
    for rank, signature in enumerate(signatures):
        if list(signature) == list(reference):
            continue
        for index in range(max(len(reference), len(signature))):
            mine = signature[index] if index < len(signature) else "nothing more"
            expected = reference[index] if index < len(reference) else "nothing more"
            if mine != expected:
                raise SignatureMismatch(
                    f"{what} differ between ranks: entry {index} is «{expected}» on rank 0 and «{mine}» on rank {rank}"
                )
