"""Broadcasts one rank's tensors, and structures that hold some."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from overlap.transport.communicator import Communicator
from overlap.transport.memory import is_dense
from overlap.transport.objects import broadcast_made
from overlap.transport.operation import broadcast

__all__ = [
    "broadcast_described",
    "broadcast_structure",
    "broadcast_tensors",
    "is_plain",
    "overwrite",
    "plant",
    "uproot",
]


def broadcast_tensors(comm: Communicator, tensors: Sequence[torch.Tensor], root: int) -> None:
    """Overwrite `tensors` with the root's, any dtype and layout, all in flight together. On every rank of `comm`.

    Sparse and quantized ones travel pickled. Raises :class:`overlap.transport.objects.NotSent` on all ranks where one of
    the root's cannot be read.
    """
    if not 0 <= root < comm.size:
        raise ValueError(f"root should be a rank from 0 to {comm.size - 1} and is {root}")
    if comm.size == 1:
        return
    mine = list(tensors)
    staged: dict[int, torch.Tensor] = {}

    def stage() -> dict[int, torch.Tensor]:
        staged.update((index, _staged(tensor)) for index, tensor in enumerate(mine) if is_plain(tensor))
        return {index: tensor.detach().cpu() for index, tensor in enumerate(mine) if index not in staged}

    pickled = broadcast_made(comm, stage, root)  # before the first tensor: what fails in there fails everywhere
    if comm.rank != root:
        staged.update((index, _staged(tensor)) for index, tensor in enumerate(mine) if index not in pickled)
    inflight = [(comm.start(broadcast(values, root)), values, mine[index]) for index, values in staged.items()]
    for work, values, tensor in inflight:
        work.wait()
        if comm.rank != root and values.data_ptr() != tensor.data_ptr():
            overwrite(tensor.data, values)  # of which no version counter tells, as of what came without a copy
    if comm.rank != root:
        for index, values in pickled.items():
            _replace(mine[index], values)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether shape, strides and elements are all there is to a tensor; not so for sparse or quantized ones."""
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested


def _staged(tensor: torch.Tensor) -> torch.Tensor:
    """The elements on the CPU, one after the other; a copy where they do not lie like that."""
    return _resolved(tensor).contiguous().cpu()


def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    """A view, or a copy where conjugation or negation is still to be done."""
    return tensor.detach().resolve_conj().resolve_neg()


@torch.no_grad()
def _replace(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Make a tensor that is not plain the same as `values`, which may have another number of elements."""
    if tensor.layout is values.layout and tensor.layout not in (torch.strided, torch.sparse_coo):
        tensor.resize_as_sparse_(values)
    tensor.copy_(values.to(tensor.device))


@torch.no_grad()
def overwrite(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Copy `values` (same shape) into `tensor`; where it repeats memory (expanded), each place is written once."""
    target = tensor.detach()
    if not is_dense(target):
        where = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in target.stride())
        target, values = target[where], values[where]
    target.copy_(values)


@dataclass(frozen=True)
class _Placeholder:
    """Stands for a tensor in a structure that travels without its tensors, but for those that are not plain."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device_type: str
    is_parameter: bool
    requires_grad: bool
    content: torch.Tensor | None


def uproot(value: Any, tensors: list[torch.Tensor]) -> Any:
    """A copy of `value` with placeholders for its tensors, which are appended to `tensors`; sparse ones stay inside."""
    if isinstance(value, torch.Tensor):
        content = None if is_plain(value) else value.detach().cpu()
        if content is None:
            tensors.append(_resolved(value))
        is_parameter = isinstance(value, torch.nn.Parameter)
        shape = () if value.is_nested else tuple(value.shape)
        return _Placeholder(shape, value.dtype, value.device.type, is_parameter, value.requires_grad, content)
    return _rebuilt(value, lambda item: uproot(item, tensors))


def plant(value: Any, tensors: list[torch.Tensor]) -> Any:
    """A copy of `value` with new tensors for its placeholders; their memory is appended to `tensors`, to be filled."""
    if isinstance(value, _Placeholder):
        if value.content is None:
            tensor = torch.empty(value.shape, dtype=value.dtype, device=value.device_type)
            tensors.append(tensor)
        else:
            tensor = value.content.to(value.device_type)
        if value.is_parameter:
            return torch.nn.Parameter(tensor, value.requires_grad)
        return tensor.detach().requires_grad_() if value.requires_grad else tensor
    return _rebuilt(value, lambda item: plant(item, tensors))


def _rebuilt(value: Any, replace: Callable[[Any], Any]) -> Any:
    """A copy of a dictionary, list or tuple with its items replaced, of the same type; anything else as it is."""
    if isinstance(value, dict):
        same = copy.copy(value)  # keeps a default factory, an order, attributes
        for key, item in value.items():
            same[key] = replace(item)
        return same
    if isinstance(value, Mapping):
        return {key: replace(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [replace(item) for item in value]
        return (
            value._make(items) if hasattr(value, "_make") else type(value)(items)
        )  # a named tuple takes them one by one
    return value


def broadcast_structure(comm: Communicator, value: Any, root: int) -> Any:
    """The root's nested dicts, lists and tuples with the tensors in them, on every rank; new tensors elsewhere.

    What is no tensor travels pickled. The others' `value` does not matter. On every rank of `comm`. Raises
    :class:`overlap.transport.objects.NotSent` on all of them where something cannot be sent.
    """
    if comm.size == 1:
        return value
    received = broadcast_described(comm, lambda tensors: uproot(value, tensors), root)
    return value if comm.rank == root else received


def broadcast_described(comm: Communicator, describe: Callable[[list[torch.Tensor]], Any], root: int) -> Any:
    """Broadcast the structure that `describe` gives on the root, with the tensors that it appends for its placeholders.

    The root gets its own description back. On every rank of `comm`, more than one.
    """
    tensors: list[torch.Tensor] = []
    described = broadcast_made(comm, lambda: describe(tensors), root)
    received = described if comm.rank == root else plant(described, tensors)
    broadcast_tensors(comm, tensors, root)
    return received
