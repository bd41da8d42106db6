"""Every collective as the benchmark runs it: ours and torch.distributed/gloo's, on the same tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from overlap.transport.communicator import Communicator
from overlap.transport.operation import all_gather, all_reduce, all_to_all, barrier, broadcast, reduce, reduce_scatter

__all__ = ["OPERATIONS", "Operation"]

Call = Callable[[], object]
Make = Callable[[Communicator, dist.ProcessGroup, int], tuple[Call, Call]]


@dataclass(frozen=True)
class Operation:
    """`make(comm, gloo, numel)` returns our call and gloo's, both blocking, for a buffer of `numel` fp32 elements.

    `wire(size)` is the share of the buffer that crosses each rank's link in each direction; bus bandwidth is
    buffer bytes x wire / time, so that it can be compared with the link's rate for every operation and size.
    """

    make: Make
    wire: Callable[[int], float]


# Newer versions of torch call them by other names, and warn of the old ones.
_gloo_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_gloo_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _padded(comm: Communicator, numel: int) -> int:
    return -(-numel // comm.size) * comm.size


def _reduce_scatter(comm: Communicator, gloo: dist.ProcessGroup, numel: int) -> tuple[Call, Call]:
    whole = torch.ones(_padded(comm, numel))
    part = torch.empty(whole.numel() // comm.size)
    return lambda: comm.run(reduce_scatter(whole, part)), lambda: _gloo_reduce_scatter(part, whole, group=gloo)


def _all_gather(comm: Communicator, gloo: dist.ProcessGroup, numel: int) -> tuple[Call, Call]:
    whole = torch.empty(_padded(comm, numel))
    part = torch.ones(whole.numel() // comm.size)
    return lambda: comm.run(all_gather(part, whole)), lambda: _gloo_all_gather(whole, part, group=gloo)


def _all_reduce(comm: Communicator, gloo: dist.ProcessGroup, numel: int) -> tuple[Call, Call]:
    whole = torch.zeros(numel)
    return lambda: comm.run(all_reduce(whole, whole)), lambda: dist.all_reduce(whole, group=gloo)


def _broadcast(comm: Communicator, gloo: dist.ProcessGroup, numel: int) -> tuple[Call, Call]:
    whole = torch.zeros(numel)
    return lambda: comm.run(broadcast(whole, 0)), lambda: dist.broadcast(whole, 0, group=gloo)


def _reduce(comm: Communicator, gloo: dist.ProcessGroup, numel: int) -> tuple[Call, Call]:
    whole, result = torch.zeros(numel), torch.empty(numel)
    return lambda: comm.run(reduce(whole, result)), lambda: dist.reduce(whole, 0, group=gloo)


def _all_to_all(comm: Communicator, gloo: dist.ProcessGroup, numel: int) -> tuple[Call, Call]:
    send = torch.ones(_padded(comm, numel))
    recv = torch.empty_like(send)
    return lambda: comm.run(all_to_all(send, recv)), lambda: dist.all_to_all_single(recv, send, group=gloo)


def _barrier(comm: Communicator, gloo: dist.ProcessGroup, numel: int) -> tuple[Call, Call]:
    return lambda: comm.run(barrier()), lambda: dist.barrier(group=gloo)


def _one_part(size: int) -> float:
    return (size - 1) / size


OPERATIONS: dict[str, Operation] = {
    "reduce_scatter": Operation(_reduce_scatter, _one_part),
    "all_gather": Operation(_all_gather, _one_part),
    "all_reduce": Operation(_all_reduce, lambda size: 2 * _one_part(size)),
    "broadcast": Operation(_broadcast, lambda size: 1.0),
    "reduce": Operation(_reduce, lambda size: 1.0),
    "all_to_all": Operation(_all_to_all, _one_part),
    "barrier": Operation(_barrier, lambda size: 0.0),
}
