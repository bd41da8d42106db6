"""Broadcast by name: the root's tensor on every rank."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from overlap.horovod.allreduce import allreduce
from overlap.horovod.controller.enqueue import enqueue, operation_name, runtime
from overlap.horovod.controller.operation import Group, Only, Operation, Pending
from overlap.horovod.controller.request import Kind, Request, Response
from overlap.horovod.reduction import Average
from overlap.horovod.tensors import own_copy, plain, put_back, spec_of, tensors_of
from overlap.job.process_set import ProcessSet, global_process_set
from overlap.transport.communicator import Work
from overlap.transport.operation import broadcast as from_root

__all__ = ["broadcast", "broadcast_", "broadcast_async", "broadcast_async_", "broadcast_group", "check_root"]


def check_root(root_rank: int, group: Group) -> int:
    """Check that `root_rank` is a rank of the process set, and return it as an int.

    Raises ``ValueError`` when it is not in the process set, ``TypeError`` for no number.
    """
    try:
        root = operator.index(root_rank)
    except TypeError:
        raise TypeError(f"root_rank should be a rank and is {root_rank!r}") from None
    if root not in group.ranks:
        raise ValueError(f"root_rank {root} is not one of the ranks {list(group.ranks)}")
    return root


class _Broadcast(Operation):
    """The root's tensors, in place of this rank's or as new ones."""

    def __init__(self, tensors: Sequence[torch.Tensor], *, in_place: bool) -> None:
        self._tensors, self._in_place = list(tensors), in_place
        self._buffers = [plain(tensor) if in_place else own_copy(tensor) for tensor in tensors]
        self._is_root = False

    def start(self, response: Response, group: Group) -> list[Work]:
        root = group.ranks.index(response.request.root)
        self._is_root = root == group.index
        name = response.request.name
        return [group.members.start(from_root(buffer, root, label=name)) for buffer in self._buffers]

    def result(self) -> list[torch.Tensor]:
        if not self._in_place:
            pairs = zip(self._buffers, self._tensors, strict=True)
            return [buffer.to(tensor.device) for buffer, tensor in pairs]
        for buffer, tensor in zip(self._buffers, self._tensors, strict=True):
            if not self._is_root and buffer.data_ptr() != tensor.data_ptr():
                put_back(tensor, buffer)
        return self._tensors


class _Call(NamedTuple):
    root: int
    name: str
    process_set: ProcessSet

    def start(self, tensor: torch.Tensor, *, in_place: bool) -> Pending:
        return self.start_group(lambda: [("", tensor)], in_place=in_place, single=True)

    def start_group(
        self, named: Callable[[], Sequence[tuple[str, torch.Tensor]]], *, in_place: bool = True, single: bool = False
    ) -> Pending:
        """`named` gives labels and tensors; where it raises, the operation is refused on every rank."""

        def prepare(name: str, group: Group) -> tuple[Request, Operation]:
            pairs = named()
            members = tensors_of("broadcast", [tensor for _, tensor in pairs])
            specs = tuple(spec_of(tensor, label) for tensor, (label, _) in zip(members, pairs, strict=True))
            request = Request(Kind.BROADCAST, name, group.number, specs, root=check_root(self.root, group))
            operation = _Broadcast(members, in_place=in_place)
            return request, Only(operation) if single else operation

        return enqueue(Kind.BROADCAST, self.name, self.process_set, prepare)


def _call(root_rank: int, name: str | None, process_set: ProcessSet) -> _Call:
    return _Call(root_rank, operation_name(Kind.BROADCAST, name, process_set), process_set)


class _Differentiable(torch.autograd.Function):
    """As in Horovod, the root's gradient is the average over ranks, and the others', whose input is not used, zero."""

    @staticmethod
    def forward(ctx: Any, call: _Call, tensor: torch.Tensor) -> torch.Tensor:
        ctx.call = call
        result: torch.Tensor = call.start(tensor, in_place=False).wait()
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: _Call = ctx.call
        name = f"broadcast {call.name}.backward"
        reduced = allreduce(gradients[0], op=Average, name=name, process_set=call.process_set)
        return None, reduced if runtime().rank == call.root else torch.zeros_like(reduced)


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """A new tensor: that of `root_rank`, a rank of the job. On every rank of `process_set`, same shape and dtype.

    Differentiable: the root's gradient is averaged over ranks, as in Horovod. Raises :class:`Mismatch` on all ranks when
    they disagree on root, shape or dtype.
    """
    result: torch.Tensor = _Differentiable.apply(_call(root_rank, name, process_set), tensor)
    return result


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """As :func:`broadcast`, not differentiable; returns at once a handle for ``poll`` and ``synchronize``."""
    call = _call(root_rank, name, process_set)
    return runtime().handles.give(call.start(tensor, in_place=False))


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Overwrite `tensor` with the root's, and return it; autograd does not see it."""
    call = _call(root_rank, name, process_set)
    result: torch.Tensor = call.start(tensor, in_place=True).wait()
    return result


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """As :func:`broadcast_`; `tensor` belongs to the operation until ``synchronize`` has had the handle."""
    call = _call(root_rank, name, process_set)
    return runtime().handles.give(call.start(tensor, in_place=True))


def broadcast_group(named: Callable[[], Sequence[tuple[str, torch.Tensor]]], root_rank: int) -> None:
    """Overwrite all tensors that `named` gives with the root's as one operation; all ranks have to give the same labels.

    What `named` raises is raised here, and told to the other ranks.
    """
    _call(root_rank, None, global_process_set).start_group(named).wait()
