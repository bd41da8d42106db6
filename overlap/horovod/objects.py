"""Any Python object, pickled: one rank's on all ranks, all ranks' on each."""

from __future__ import annotations

import pickle
from typing import Any, TypeVar

import torch

from overlap.horovod.broadcast import check_root
from overlap.horovod.controller.enqueue import ask, operation_name
from overlap.horovod.controller.operation import Group, Operation
from overlap.horovod.controller.request import Kind, Request, Response
from overlap.horovod.moving import Allgather
from overlap.horovod.tensors import spec_of
from overlap.job.process_set import ProcessSet, global_process_set
from overlap.transport.communicator import Work
from overlap.transport.unpickling import loads

__all__ = ["allgather_object", "broadcast_object"]

T = TypeVar("T")


def _pickled(obj: Any) -> torch.Tensor:
    try:
        return torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(f"{type(obj).__name__} cannot be pickled: {error}") from error


class _BroadcastObject(Operation):
    """The bytes of the root's object; how many there are came with the response."""

    def __init__(self, payload: torch.Tensor | None) -> None:
        self._payload = payload

    def start(self, response: Response, group: Group) -> list[Work]:
        request = response.request
        if self._payload is None:
            self._payload = torch.empty(request.tensors[0].shape, dtype=torch.uint8, device="cpu")
        return [group.members.broadcast_async(self._payload, group.ranks.index(request.root), label=request.name)]

    def result(self) -> Any:
        assert self._payload is not None, "started"
        return loads(self._payload.numpy().tobytes())


def broadcast_object(
    obj: T, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> T:
    """The object of `root_rank`, a rank of the job: itself there, a pickled copy elsewhere. On every rank of the set.

    The others' `obj` is not looked at. Unpickling runs code of the root's choosing, as everything in a job does.
    """
    roots = False

    def prepare(name: str, group: Group) -> tuple[Request, Operation]:
        nonlocal roots
        root = check_root(root_rank, group)
        roots = group.ranks[group.index] == root
        payload = _pickled(obj) if roots else None
        specs = () if payload is None else (spec_of(payload),)
        return Request(Kind.BROADCAST_OBJECT, name, group.number, specs, root=root), _BroadcastObject(payload)

    found = operation_name(Kind.BROADCAST_OBJECT, name, process_set)
    received: T = ask(Kind.BROADCAST_OBJECT, found, process_set, prepare).wait()
    return obj if roots else received


class _AllgatherObject(Operation):
    def __init__(self, payload: torch.Tensor) -> None:
        self._gather = Allgather([payload])

    def start(self, response: Response, group: Group) -> list[Work]:
        return self._gather.start(response, group)

    def result(self) -> list[Any]:
        (gathered,) = self._gather.result()
        (rows,) = self._gather.rows
        return [loads(part.numpy().tobytes()) for part in gathered.split(list(rows)) if part.numel()]


def allgather_object(obj: T, name: str | None = None) -> list[T]:
    """Every rank's object, pickled, in rank order; nothing for ranks that have joined. On every rank."""

    def prepare(name: str, group: Group) -> tuple[Request, Operation]:
        payload = _pickled(obj)
        return Request(Kind.ALLGATHER, name, group.number, (spec_of(payload),)), _AllgatherObject(payload)

    found = f"{operation_name(Kind.ALLGATHER, name, global_process_set)} (objects)"
    result: list[T] = ask(Kind.ALLGATHER, found, global_process_set, prepare).wait()
    return result
