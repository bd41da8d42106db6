"""Flat memory for the tensors of a call, of any strides: their own where it is flat, else memory beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from comm_core import InvalidUsage, Unsupported
from overlap.transport.checks import overlap_in_memory, same_memory

__all__ = ["Finish", "apart", "flat", "landing", "landings", "sources"]

#: Brings what has arrived to where the caller looks for it; None: it is there.
Finish = Callable[[], object] | None


def flat(tensor: Tensor) -> Tensor:
    """The elements of a dense `tensor` in order, flat and without gaps. They may be a copy; nothing writes to them."""
    data = _data(tensor)
    return data.view(-1) if _is_plain(data) else data.resolve_conj().resolve_neg().contiguous().view(-1)


def landing(tensor: Tensor, *, filled: bool = False, beside: Tensor | None = None) -> tuple[Tensor, Finish]:
    """Flat memory in which what is for `tensor` arrives, and how it gets from there to `tensor`.

    Args:
        filled: whether the memory has the elements of `tensor` first.
        beside: a flat tensor with which the memory shares nothing.
    """
    data = _data(tensor)
    if _is_plain(data) and (beside is None or not overlap_in_memory(data, beside)):
        return data.view(-1), None
    memory = flat(data).clone() if filled else torch.empty(data.numel(), dtype=data.dtype, device="cpu")
    return memory, lambda: data.copy_(memory.view(data.shape))


def sources(tensors: Sequence[Tensor]) -> Tensor:
    """All elements of `tensors`, of one dtype, behind each other. Nothing writes to them."""
    whole = _whole(tensors)
    return torch.cat([flat(tensor) for tensor in tensors]) if whole is None else whole


def landings(tensors: Sequence[Tensor]) -> tuple[Tensor, Finish]:
    """Flat memory in which what is for `tensors`, of one dtype, arrives behind each other, and how it gets to them."""
    whole = _whole(tensors)
    if whole is not None:
        return whole, None
    counts = [tensor.numel() for tensor in tensors]
    memory = torch.empty(sum(counts), dtype=tensors[0].dtype, device="cpu")
    data = [_data(tensor) for tensor in tensors]

    def finish() -> None:
        for target, part in zip(data, memory.split(counts), strict=True):
            target.copy_(part.view(target.shape))

    return memory, finish


def apart(source: Tensor, target: Tensor, own: Tensor | None = None) -> Tensor:
    """`source`, or a copy where it shares memory with `target` without being the part `own` of it. All are flat."""
    if not overlap_in_memory(source, target) or (own is not None and same_memory(source, own)):
        return source
    return source.clone()


def _data(tensor: Tensor) -> Tensor:
    if tensor.layout is not torch.strided:
        raise Unsupported(f"tensors have to be dense, and one has the layout {tensor.layout}; to_dense() makes it so")
    return tensor.detach()


def _is_plain(data: Tensor) -> bool:
    return data.is_contiguous() and not data.is_conj() and not data.is_neg()


def _whole(tensors: Sequence[Tensor]) -> Tensor | None:
    """All of them as one flat tensor where they lie behind each other in memory, as chunks of a tensor do."""
    first = _data(tensors[0])
    end, storage = first.data_ptr(), first.untyped_storage().data_ptr()
    lie_so = True
    for tensor in tensors:
        if tensor.dtype is not first.dtype:
            raise InvalidUsage(f"tensors of a list have to be of one dtype, got {first.dtype} and {tensor.dtype}")
        data = _data(tensor)
        lie_so = lie_so and _is_plain(data) and data.data_ptr() == end and data.untyped_storage().data_ptr() == storage
        end += data.numel() * data.element_size()
    if not lie_so or end == first.data_ptr():
        return None
    return first.as_strided((sum(tensor.numel() for tensor in tensors),), (1,), first.storage_offset())
