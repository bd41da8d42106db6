"""What a rank that has joined does in the operations of the others."""

from __future__ import annotations

import torch

from comm_core import ReduceOp
from overlap.horovod.allgather import Allgather
from overlap.horovod.allreduce import Allreduce
from overlap.horovod.controller.operation import Nothing, Operation
from overlap.horovod.controller.request import Kind, Response, TensorSpec
from overlap.horovod.tensors import dtype_of

__all__ = ["stand_in"]


def stand_in(response: Response) -> Operation:
    """An operation that contributes nothing: zeros to a sum, no rows to an all-gather."""
    request = response.request
    if request.kind is Kind.ALLREDUCE:
        op = ReduceOp[request.op]
        return Allreduce([_neutral(spec, op) for spec in request.tensors], op, 1.0, 1.0, in_place=True)
    if request.kind is Kind.ALLGATHER:
        return Allgather(
            [torch.empty((0, *spec.shape[1:]), dtype=dtype_of(spec), device="cpu") for spec in request.tensors]
        )
    assert request.kind in (Kind.BARRIER, Kind.JOIN), f"{request.title} on a rank that did not ask for it"
    return Nothing()


def _neutral(spec: TensorSpec, op: ReduceOp) -> torch.Tensor:
    """What changes no other rank's contribution. Of zeros, -0.0: it leaves the sign of the others' zeros alone."""
    dtype = dtype_of(spec)
    if op is ReduceOp.PROD:
        return torch.ones(spec.shape, dtype=dtype, device="cpu")
    if op in (ReduceOp.MIN, ReduceOp.MAX):
        return torch.full(spec.shape, _extreme(dtype, largest=op is ReduceOp.MIN), dtype=dtype, device="cpu")
    zeros = torch.zeros(spec.shape, dtype=dtype, device="cpu")
    return -zeros if dtype.is_floating_point or dtype.is_complex else zeros


def _extreme(dtype: torch.dtype, *, largest: bool) -> float:
    if dtype is torch.bool:
        return largest
    if dtype.is_floating_point:
        return float("inf") if largest else float("-inf")
    limits = torch.iinfo(dtype)
    return limits.max if largest else limits.min
