"""Gives every rank one rank's Python object, model or optimizer state."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch

from overlap.horovod.allgather import Allgather
from overlap.horovod.broadcast import broadcast_group, check_root
from overlap.horovod.controller.enqueue import enqueue, operation_name
from overlap.horovod.controller.errors import Mismatch
from overlap.horovod.controller.operation import Group, Operation
from overlap.horovod.controller.request import Kind, Request, Response
from overlap.horovod.job import rank
from overlap.horovod.tensors import spec_of
from overlap.job.process_set import ProcessSet, global_process_set
from overlap.transport.broadcast import plant, uproot
from overlap.transport.communicator import Work
from overlap.transport.objects import loads
from overlap.transport.operation import broadcast

__all__ = ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]

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
        return [group.members.start(broadcast(self._payload, group.ranks.index(request.root), label=request.name))]

    def result(self) -> Any:
        assert self._payload is not None, "started"
        return loads(self._payload.numpy().tobytes())


def broadcast_object(
    obj: T, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> T:
    """The object of `root_rank`, a rank of the job, on every rank: itself there, a pickled copy elsewhere.

    On every rank of the set.

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
    received: T = enqueue(Kind.BROADCAST_OBJECT, found, process_set, prepare).wait()
    return obj if roots else received


class _AllgatherObject(Operation):
    def __init__(self, payload: torch.Tensor) -> None:
        self._gather = Allgather([payload])

    def start(self, response: Response, group: Group) -> list[Work]:
        return self._gather.start(response, group)

    def result(self) -> list[Any]:
        (gathered,) = self._gather.result()
        (rows,) = self._gather.rows
        return [loads(part.numpy().tobytes()) for part in gathered.split(list(rows))]


def allgather_object(obj: T, name: str | None = None) -> list[T]:
    """Every rank's object, pickled, in rank order. On every rank; raises while some have joined."""
    return _allgather_of(lambda: obj, name)


def _allgather_of(value: Callable[[], T], name: str | None) -> list[T]:
    """:func:`allgather_object` of what `value` returns; what it raises is raised here, and told to the other ranks."""

    def prepare(name: str, group: Group) -> tuple[Request, Operation]:
        payload = _pickled(value())
        return Request(Kind.ALLGATHER, name, group.number, (spec_of(payload),)), _AllgatherObject(payload)

    found = f"{operation_name(Kind.ALLGATHER, name, global_process_set)} (objects)"
    result: list[T] = enqueue(Kind.ALLGATHER, found, global_process_set, prepare).wait()
    return result


def broadcast_parameters(params: Mapping[str, Any] | Iterable[Any], root_rank: int) -> None:
    """Overwrite parameters with those of `root_rank`, in place. On every rank.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()`` or ``model.parameters()``. Entries that are no tensors
            are left alone.

    Raises :class:`Mismatch` on every rank, with the parameter's name, where names, shapes or dtypes differ between ranks,
    and ``ValueError`` for anything else than these.
    """
    broadcast_group(lambda: _named_tensors(params), root_rank)


def _named_tensors(params: Any) -> list[tuple[str, torch.Tensor]]:
    if isinstance(params, Mapping):
        pairs: list[Any] = sorted(params.items(), key=lambda pair: str(pair[0]))
    elif isinstance(params, Iterable) and not isinstance(params, torch.Tensor | str):
        pairs = [item if isinstance(item, tuple) else ("", item) for item in params]
    else:
        raise ValueError(f"params should be a state_dict or a list of parameters and is a {type(params).__name__}")
    if any(len(pair) != 2 for pair in pairs):
        raise ValueError("params should be a state_dict, parameters, or pairs (name, parameter)")
    return [(str(name), value.data) for name, value in pairs if isinstance(value, torch.Tensor)]


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Give every rank the hyper-parameters and the state of `root_rank`, whatever it had before. On every rank.

    Follows the root's structure and never takes a step, which would change parameters; so it works for optimizers that
    have no state yet on some ranks, and for LBFGS. A distributed optimizer keeps its sharding.

    Args:
        model: what Horovod needs to take that step; accepted and not needed.

    Raises :class:`Mismatch` on every rank where parameter groups differ between ranks, or a rank gives no optimizer (there
    ``TypeError``).
    """
    sizes = _allgather_of(lambda: _group_sizes(optimizer), None)
    for number, found in enumerate(sizes):
        if found != sizes[0]:
            raise Mismatch(
                f"broadcast_optimizer_state: parameters per group differ between ranks: {sizes[0]} on rank 0 and {found} "
                f"on rank {number}"
            )
    tensors: list[torch.Tensor] = []
    root = rank() == root_rank
    structure = broadcast_object(uproot(optimizer.state_dict(), tensors) if root else None, root_rank)
    if not root:
        loaded = plant(structure, tensors)
    broadcast_group(lambda: [(str(index), tensor) for index, tensor in enumerate(tensors)], root_rank)
    if not root:
        optimizer.load_state_dict(loaded)


def _group_sizes(optimizer: Any) -> list[int]:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer should be a torch.optim.Optimizer and is {type(optimizer).__name__}")
    return [len(group["params"]) for group in optimizer.param_groups]
