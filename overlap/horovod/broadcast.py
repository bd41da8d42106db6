"""The root's tensor on every rank, by name."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from overlap.horovod.allreduce import allreduce
from overlap.horovod.controller.enqueue import ask, operation_name, runtime
from overlap.horovod.controller.operation import Group, Only, Operation
from overlap.horovod.controller.pending import Pending
from overlap.horovod.controller.request import Kind, Request
from overlap.horovod.moving import Broadcast
from overlap.horovod.reduction import Average
from overlap.horovod.tensors import spec_of, tensors_of
from overlap.job.process_set import ProcessSet, global_process_set

__all__ = ["broadcast", "broadcast_", "broadcast_async", "broadcast_async_", "broadcast_group", "check_root"]


def check_root(root_rank: int, group: Group) -> int:
    """The root, a rank of the job. Raises ``ValueError`` when it is not in the process set, ``TypeError`` for no number."""
    try:
        root = operator.index(root_rank)
    except TypeError:
        raise TypeError(f"root_rank should be a rank and is {root_rank!r}") from None
    if root not in group.ranks:
        raise ValueError(f"root_rank {root} is not one of the ranks {list(group.ranks)}")
    return root


class _Call(NamedTuple):
    root: int
    name: str
    process_set: ProcessSet

    def start(self, tensors: Sequence[torch.Tensor], labels: Sequence[str], *, in_place: bool, single: bool) -> Pending:
        def prepare(name: str, group: Group) -> tuple[Request, Operation]:
            members = tensors_of("broadcast", tensors)
            specs = tuple(spec_of(tensor, label) for tensor, label in zip(members, labels, strict=True))
            request = Request(Kind.BROADCAST, name, group.number, specs, root=check_root(self.root, group))
            operation = Broadcast(members, in_place=in_place)
            return request, Only(operation) if single else operation

        return ask(Kind.BROADCAST, self.name, self.process_set, prepare)


def _call(root_rank: int, name: str | None, process_set: ProcessSet) -> _Call:
    return _Call(root_rank, operation_name(Kind.BROADCAST, name, process_set), process_set)


class _Differentiable(torch.autograd.Function):
    """As in Horovod, the root's gradient is the average over ranks, and the others', whose input is not used, zero."""

    @staticmethod
    def forward(ctx: Any, call: _Call, tensor: torch.Tensor) -> torch.Tensor:
        ctx.call = call
        result: torch.Tensor = call.start([tensor], [""], in_place=False, single=True).wait()
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
    return runtime().handles.give(call.start([tensor], [""], in_place=False, single=True))


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Overwrite `tensor` with the root's, and return it; autograd does not see it."""
    call = _call(root_rank, name, process_set)
    result: torch.Tensor = call.start([tensor], [""], in_place=True, single=True).wait()
    return result


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """As :func:`broadcast_`; `tensor` belongs to the operation until ``synchronize`` has had the handle."""
    call = _call(root_rank, name, process_set)
    return runtime().handles.give(call.start([tensor], [""], in_place=True, single=True))


def broadcast_group(tensors: Sequence[torch.Tensor], labels: Sequence[str], root_rank: int) -> None:
    """Overwrite all `tensors` with the root's as one operation; all ranks have to give the same labels."""
    call = _call(root_rank, None, global_process_set)
    call.start(tensors, labels, in_place=True, single=False).wait()
