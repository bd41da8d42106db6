"""Four ways of a tensor into and out of the part of a model that ranks share, each with its way back (Megatron-LM, 3).

                 forward                              backward
    copy         as it is                             sum over the ranks
    reduce       sum over the ranks                   as it is
    scatter      this rank's part of the last axis    all parts side by side
    gather       all parts side by side               this rank's part

All are called by every rank of the tensor axis, in the same order, with tensors of the same shape but for what is divided.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from model_parallel.initialize import tensor_axis
from overlap.job.axes import Axis
from overlap.transport.communicator import ReduceOp
from overlap.transport.operation import all_gather, all_reduce
from overlap.transport.work import Work, arrive

__all__ = [
    "copy_to_model_parallel_region",
    "gather_from_model_parallel_region",
    "own_part",
    "reduce_from_model_parallel_region",
    "scatter_to_model_parallel_region",
    "side_by_side",
    "sizes",
    "start_sum",
    "summed",
]


def sizes(total: int, parts: int) -> tuple[int, ...]:
    """The lengths of `parts` of an axis of this length, as even as can be, longer ones first (pure)."""
    return tuple(total // parts + (part < total % parts) for part in range(parts))


def start_sum(tensor: torch.Tensor, axis: Axis, op: ReduceOp = ReduceOp.SUM) -> tuple[torch.Tensor, Work | None]:
    """A new tensor that has the reduction over the ranks once the work is done; `tensor` stays as it is."""
    if axis.size == 1:
        return tensor, None
    total = tensor.detach().contiguous().clone()
    return total, axis.on(total).start(all_reduce(total, total, op, label=f"{axis.name} axis"))


def summed(tensor: torch.Tensor, axis: Axis, op: ReduceOp = ReduceOp.SUM) -> torch.Tensor:
    """The reduction over the ranks, which it waits for."""
    total, work = start_sum(tensor, axis, op)
    if work is not None:
        arrive(work)
    return total


def side_by_side(part: torch.Tensor, axis: Axis, lengths: Sequence[int]) -> torch.Tensor:
    """The parts of all ranks along the last axis, of these `lengths`."""
    if axis.size == 1:
        return part
    part = part.detach().contiguous()
    rows = part.numel() // max(part.shape[-1], 1)
    whole = part.new_empty(rows * sum(lengths))
    counts = [rows * length for length in lengths]
    arrive(axis.on(whole).start(all_gather(part.view(-1), whole, counts=counts, label=f"{axis.name} axis")))
    pieces = whole.split(counts)
    return torch.cat(
        [piece.view(*part.shape[:-1], length) for piece, length in zip(pieces, lengths, strict=True)], dim=-1
    )


def own_part(whole: torch.Tensor, axis: Axis, lengths: Sequence[int], dim: int = -1) -> torch.Tensor:
    """This rank's part of `whole` along `dim`, as a tensor of its own memory."""
    return whole.detach().split(list(lengths), dim)[axis.rank].contiguous()


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis = axis
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return summed(gradient, ctx.axis), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
        return summed(tensor, axis)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, axis: Axis, lengths: tuple[int, ...]) -> torch.Tensor:
        ctx.axis, ctx.lengths = axis, lengths
        return own_part(tensor, axis, lengths)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return side_by_side(gradient, ctx.axis, ctx.lengths), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, axis: Axis, lengths: tuple[int, ...]) -> torch.Tensor:
        ctx.axis, ctx.lengths = axis, lengths
        return side_by_side(tensor, axis, lengths)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return own_part(gradient, ctx.axis, ctx.lengths), None, None


def copy_to_model_parallel_region(tensor: torch.Tensor, axis: Axis | None = None) -> torch.Tensor:
    """`tensor`, whose gradient is summed over the ranks. On every rank of the tensor axis."""
    axis = axis or tensor_axis()
    found: torch.Tensor = tensor if axis.size == 1 else _Copy.apply(tensor, axis)
    return found


def reduce_from_model_parallel_region(tensor: torch.Tensor, axis: Axis | None = None) -> torch.Tensor:
    """The sum of `tensor` over the ranks. On every rank of the tensor axis."""
    axis = axis or tensor_axis()
    found: torch.Tensor = tensor if axis.size == 1 else _Reduce.apply(tensor, axis)
    return found


def scatter_to_model_parallel_region(tensor: torch.Tensor, axis: Axis | None = None) -> torch.Tensor:
    """This rank's part of the last axis of `tensor`, which all ranks have alike. On every rank of the tensor axis."""
    axis = axis or tensor_axis()
    found: torch.Tensor = tensor
    if axis.size > 1:
        found = _Scatter.apply(tensor, axis, sizes(tensor.shape[-1], axis.size))
    return found


def gather_from_model_parallel_region(
    tensor: torch.Tensor, axis: Axis | None = None, lengths: Sequence[int] | None = None
) -> torch.Tensor:
    """The parts of all ranks side by side along the last axis, of these `lengths`: None, all as long as this rank's.

    On every rank of the tensor axis.
    """
    axis = axis or tensor_axis()
    found: torch.Tensor = tensor
    if axis.size > 1:
        found = _Gather.apply(tensor, axis, tuple(lengths or (tensor.shape[-1],) * axis.size))
    return found
