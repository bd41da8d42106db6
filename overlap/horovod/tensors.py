"""Turns the caller's tensors into plain memory that collectives move, and back."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from comm_core import InvalidUsage, ReduceOp, Unsupported
from overlap.horovod.controller.request import TensorSpec
from overlap.transport.broadcast import overwrite
from overlap.transport.checks import wire_form

__all__ = ["check_reducible", "dtype_of", "own_copy", "plain", "put_back", "scale_", "spec_of", "tensors_of"]


def tensors_of(what: str, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors of a group. Raises where one is none, sparse, quantized, or without values (on the meta device)."""
    given = [] if isinstance(tensors, torch.Tensor) else list(tensors)  # once: it may be a generator
    if isinstance(tensors, torch.Tensor) or not all(isinstance(tensor, torch.Tensor) for tensor in given):
        raise TypeError(f"{what} takes tensors and was given {_types(tensors)}")
    for tensor in given:
        if tensor.is_nested:
            raise InvalidUsage(
                f"{what} takes dense tensors and was given a nested one; gather its values and its sizes"
            )
        if tensor.layout is not torch.strided:
            raise InvalidUsage(
                f"{what} takes dense tensors and was given {tensor.layout}; see sparse_allreduce_async()"
            )
        if tensor.is_quantized:
            raise InvalidUsage(
                f"{what} takes dense tensors and was given a quantized one, whose scale may differ between ranks; "
                "dequantize() it"
            )
        if tensor.is_meta:
            raise InvalidUsage(f"{what} was given a tensor on the meta device, which has no values")
    return given


def _types(tensors: object) -> str:
    if isinstance(tensors, list | tuple):
        return " and ".join(f"a {name}" for name in sorted({type(item).__name__ for item in tensors}))
    return f"a {type(tensors).__name__} instead of a list of them"


def spec_of(tensor: torch.Tensor, label: str = "") -> TensorSpec:
    """The description of a tensor in requests."""
    return TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), label)


def dtype_of(spec: TensorSpec) -> torch.dtype:
    """The dtype that a tensor's description names."""
    dtype = getattr(torch, spec.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` as contiguous CPU memory without autograd: itself where it is that, else a copy."""
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()


def own_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy as contiguous CPU memory that nobody else has."""
    staged = plain(tensor)
    return staged.clone() if staged.data_ptr() == tensor.data_ptr() else staged


def check_reducible(what: str, tensor: torch.Tensor, op: ReduceOp, *factors: float) -> None:
    """Raise ``Unsupported`` where ranks cannot reduce tensors of this dtype with `op` and scale `factors`."""
    if tensor.dtype is torch.bool and (op is ReduceOp.AVG or any(factor != 1.0 for factor in factors)):
        raise Unsupported(
            f"{what}: booleans can be neither averaged nor scaled; use Sum (or), Product (and), Min or Max"
        )
    wire_form(what, "tensor", torch.empty(0, dtype=tensor.dtype, device="cpu"), op)


@torch.inference_mode()  # as `scale_`
def put_back(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Copy `values` (same shape) into the caller's `tensor`."""
    overwrite(tensor, values)


# In place also where the script made the tensor in inference mode, which another thread is not in, or has left it since.
@torch.inference_mode()
def scale_(tensor: torch.Tensor, factor: float) -> None:
    """Multiply `tensor` in place; integers are multiplied in fp64 and cut off towards zero."""
    if factor == 1.0:
        return
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        tensor.mul_(factor)
    else:
        tensor.copy_(tensor.double().mul_(factor))
