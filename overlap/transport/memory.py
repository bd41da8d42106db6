"""Tensors of any dense layout (contiguous, channels-last, permuted) inside flat memory."""

from __future__ import annotations

import math

import torch

from overlap.transport.native import copy_plus_zero

__all__ = [
    "copy_used",
    "from_flat",
    "is_dense",
    "narrow_summands",
    "to_flat",
    "unused_mark",
    "unused_positions",
    "values_of",
    "view_like",
]

_COPIED = frozenset((torch.float32, torch.float64, torch.float16, torch.bfloat16))
_SPLIT = 2**15  # elements from which on torch gives each of its threads a part …
_BEATEN = 2  # … and so many copy no faster than one that writes past the caches
_FEW = 16  # pieces whose first elements Python looks at faster than four more operations would


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
    """The dense tensor that holds a gradient's numbers, those of a sparse one, too."""
    return gradient._values() if gradient.layout is torch.sparse_coo else gradient


def from_flat(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`to_flat`: a view of `flat` shaped and laid out as `like`."""
    return view_like(flat, 0, like)


# [Note: signed zero tells unused parameters]
# A parameter that no rank used in a step must be left alone: no decay, no momentum. Whether it was used travels inside
# the reduced values, at no extra byte: a rank that did not use it contributes -0.0, one that did writes its gradient
# with +0.0 added, which turns -0.0 into +0.0 and changes nothing else. In IEEE arithmetic (-0.0) + (-0.0) is the only
# sum of such values that is -0.0, so an element is -0.0 after the reduction exactly where no rank used the parameter.


def copy_used(target: torch.Tensor, gradient: torch.Tensor) -> None:
    """Copy a gradient into its place in one pass, -0.0 turned into +0.0. Autograd does not hear of it."""
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
        copy_plus_zero(target, gradient)
    elif torch.is_grad_enabled():  # not inside backward, where this happens for every gradient
        with torch.no_grad():
            torch.add(gradient, 0.0, out=target)
    else:
        torch.add(gradient, 0.0, out=target)


def narrow_summands(target: torch.Tensor, gradients: torch.Tensor) -> None:
    """Round `gradients` into `target`, a 16-bit type. What only rounding makes zero becomes +0.0; marks stay."""
    target.copy_(gradients)
    target.masked_fill_((target == 0) & (gradients != 0), 0.0)


def unused_mark(target: torch.Tensor) -> None:
    """Fill the place of a gradient that this rank did not compute."""
    (torch.view_as_real(target) if target.is_complex() else target).fill_(-0.0)


def _is_mark(values: torch.Tensor) -> torch.Tensor:
    if values.is_complex():
        return _is_mark(torch.view_as_real(values)).all(dim=-1)
    return (values == 0) & torch.signbit(values)


def unused_positions(flat: torch.Tensor, starts: torch.Tensor, stops: list[int]) -> list[bool]:
    """For each piece flat[start:stop] of a reduced buffer: did no rank use it?

    One gather looks at the first element of each piece; only where that is the mark is the whole piece read.
    """
    if starts.numel() == 0:
        return []
    firsts = flat.index_select(0, starts)
    if len(stops) <= _FEW and not flat.is_complex():
        suspects = [value == 0 and math.copysign(1.0, value) < 0 for value in firsts.tolist()]
        if not any(suspects):
            return suspects
    else:
        marked = _is_mark(firsts)
        if not bool(marked.any()):
            return [False] * len(stops)
        suspects = marked.tolist()
    pieces = zip(suspects, starts.tolist(), stops, strict=True)
    return [suspect and bool(_is_mark(flat[start:stop]).all()) for suspect, start, stop in pieces]
