"""The functions that every strategy's package offers, named and ordered as in ``horovod.torch``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch

from overlap import broadcast as _broadcast
from overlap import objects as _objects
from overlap.communicator import Communicator, ReduceOp
from overlap.session import current, init, is_initialized, shutdown

__all__ = [
    "Average",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "clip_grad_norm_",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
]

T = TypeVar("T")

Average, Sum, Min, Max, Product = ReduceOp.AVG, ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PROD


def _comm() -> Communicator:
    return current().comm


def rank() -> int:
    """This process's number, 0 to ``size() - 1``."""
    return _comm().rank


def size() -> int:
    """How many processes train together."""
    return _comm().size


def local_rank() -> int:
    """This process's number among those of its host."""
    return current().local_rank


def local_size() -> int:
    """How many of the processes run on this host."""
    return current().local_size


def barrier() -> None:
    """Wait until every rank has come here. On every rank."""
    _comm().barrier()


def allreduce(tensor: torch.Tensor, op: ReduceOp = Average) -> torch.Tensor:
    """A new tensor: the reduction of every rank's `tensor` (same shape and dtype). On every rank."""
    return allreduce_(tensor.detach().clone(memory_format=torch.contiguous_format), op)


def allreduce_(tensor: torch.Tensor, op: ReduceOp = Average) -> torch.Tensor:
    """Reduce `tensor` (contiguous, same shape and dtype on all ranks) in place, and return it. On every rank."""
    _comm().all_reduce(tensor, tensor, op)
    return tensor


def allgather(tensor: torch.Tensor) -> torch.Tensor:
    """Every rank's tensor, one after the other along the first dimension, which may differ between ranks."""
    comm = _comm()
    plain = tensor.detach().contiguous()
    if plain.dim() == 0:
        plain = plain.reshape(1)
    shapes = _objects.allgather_object(comm, tuple(plain.shape))
    if any(shape[1:] != plain.shape[1:] for shape in shapes):
        raise ValueError(f"tensors to gather should agree in all dimensions but the first; shapes by rank: {shapes}")
    counts = [torch.Size(shape).numel() for shape in shapes]
    gathered = plain.new_empty((sum(shape[0] for shape in shapes), *plain.shape[1:]))
    comm.all_gather(plain, gathered, counts=counts)
    return gathered


def broadcast(tensor: torch.Tensor, root_rank: int) -> torch.Tensor:
    """A new tensor: `root_rank`'s. On every rank, with the same shape and dtype."""
    return broadcast_(tensor.detach().clone(memory_format=torch.contiguous_format), root_rank)


def broadcast_(tensor: torch.Tensor, root_rank: int) -> torch.Tensor:
    """Overwrite `tensor` (contiguous) with `root_rank`'s, and return it. On every rank."""
    _comm().broadcast(tensor, root_rank)
    return tensor


def broadcast_object(obj: T, root_rank: int = 0) -> T:
    """`root_rank`'s object (pickled) on every rank. On every rank."""
    return _objects.broadcast_object(_comm(), obj, root_rank)


def allgather_object(obj: T) -> list[T]:
    """Every rank's object (pickled), in rank order. On every rank."""
    return _objects.allgather_object(_comm(), obj)


def broadcast_parameters(params: Mapping[str, Any] | Iterable[tuple[str, Any]], root_rank: int = 0) -> None:
    """Overwrite ``model.state_dict()`` or ``model.named_parameters()`` with `root_rank`'s, in place. On every rank.

    The tensors of a wrapped model's ``state_dict()`` are copies; pass ``model.named_parameters()`` after wrapping.
    """
    _broadcast.broadcast_parameters(_comm(), params, root_rank)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int = 0) -> None:
    """Give every rank `root_rank`'s hyper-parameters and state; follows the root's structure, takes no step."""
    _broadcast.broadcast_optimizer_state(_comm(), optimizer, root_rank)


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """As ``torch.nn.utils.clip_grad_norm_``, of gradients averaged over ranks, whole or sharded. On every rank.

    Raises ``ValueError`` if the parameters do not all belong to one distributed optimizer.
    """
    chosen = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    wanted = {id(parameter) for parameter in chosen}
    for optimizer in current().optimizers:
        held = {id(param) for group in optimizer.param_groups for param in group["params"]}
        if wanted <= held:
            return optimizer._clip(lambda param: id(param) in wanted, max_norm, norm_type, error_if_nonfinite)
        if wanted & held:
            raise ValueError(
                f"{len(wanted - held)} of {len(wanted)} parameters do not belong to the distributed optimizer that holds "
                "the others; clip each optimizer's parameters by themselves"
            )
    raise ValueError("the parameters belong to no distributed optimizer; wrap their optimizer first")
