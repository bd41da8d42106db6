"""Lays out tensors of any dense layout (contiguous, channels-last, permuted) in flat memory."""

from __future__ import annotations

import torch

from overlap.transport.native import copy_past_caches

__all__ = [
    "copy_gradient",
    "from_flat",
    "is_dense",
    "to_flat",
    "values_of",
    "view_like",
]

_COPIED = frozenset((torch.float32, torch.float64, torch.float16, torch.bfloat16))
_SPLIT = 2**15  # elements from which on torch gives each of its threads a part …
_BEATEN = 2  # … and so many copy no faster than one that writes past the caches


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlaps, in whatever order of dimensions."""
    if tensor.layout is not torch.strided:
        return False
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 0:
            return True
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _dense_strides(like: torch.Tensor) -> tuple[int, ...]:
    return tuple(like.stride()) if is_dense(like) else tuple(torch.empty(like.shape, device="meta").stride())


def view_like(flat: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    """A view of `flat` at `offset` with the shape and strides of `like` (contiguous ones where `like` is not dense).

    The view has a version counter of its own, so that a later change of it can be told from a change of its neighbours.
    """
    return flat.data.as_strided(like.shape, _dense_strides(like), offset)


def to_flat(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The elements of `tensor`, shaped as `like`, in the order in which `like` lies in memory."""
    flat = torch.empty(like.numel(), dtype=tensor.dtype, device=tensor.device)
    view_like(flat, 0, like).copy_(tensor)
    return flat


def values_of(gradient: torch.Tensor) -> torch.Tensor:
    """The dense tensor that holds a gradient's numbers, also of a sparse gradient."""
    return gradient._values() if gradient.layout is torch.sparse_coo else gradient


def from_flat(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`to_flat`: a view of `flat` shaped and laid out as `like`."""
    return view_like(flat, 0, like)


def copy_gradient(target: torch.Tensor, gradient: torch.Tensor) -> None:
    """Copy a gradient into its place, where it may be already. Autograd does not hear of it."""
    if (  # plain memory of one type and layout on the CPU: copying takes no torch
        type(gradient) is torch.Tensor
        and gradient.is_cpu
        and gradient.layout is torch.strided
        and gradient.dtype is target.dtype
        and gradient.dtype in _COPIED
        and gradient.stride() == target.stride()
        and gradient.shape == target.shape
        and not gradient.is_neg()
        and not gradient._is_zerotensor()
        and (gradient.numel() < _SPLIT or torch.get_num_threads() <= _BEATEN)
    ):
        copy_past_caches(target, gradient)
    elif torch.is_grad_enabled():  # not inside backward, where this happens for every gradient
        with torch.no_grad():
            target.copy_(gradient)
    else:
        target.copy_(gradient)
