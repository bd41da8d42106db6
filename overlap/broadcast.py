"""One rank's values on all ranks: tensors, parameters, optimizer state."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from overlap.communicator import Communicator
from overlap.dense import is_dense
from overlap.objects import broadcast_object

__all__ = ["broadcast_optimizer_state", "broadcast_structure", "broadcast_tensors", "overwrite", "plant", "uproot"]


def broadcast_tensors(comm: Communicator, tensors: Sequence[torch.Tensor], root: int) -> None:
    """Overwrite `tensors` with the root's, any dtype and layout, all in flight together. On every rank of `comm`."""
    if not 0 <= root < comm.size:
        raise ValueError(f"root should be a rank from 0 to {comm.size - 1} and is {root}")
    if comm.size == 1:
        return
    inflight = []
    for tensor in tensors:
        staged = tensor.detach().contiguous().cpu()  # a copy where the layout is not plain
        inflight.append((comm.broadcast_async(staged, root), staged, tensor))
    for work, staged, tensor in inflight:
        work.wait()
        if comm.rank != root and staged.data_ptr() != tensor.data_ptr():
            overwrite(tensor, staged)


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
    """Stands for a tensor in a structure that travels without its tensors."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device_type: str


def uproot(value: Any, tensors: list[torch.Tensor]) -> Any:
    """A copy of `value` with placeholders for its tensors, which are appended to `tensors`."""
    if isinstance(value, torch.Tensor):
        tensors.append(value.detach())
        return _Placeholder(tuple(value.shape), value.dtype, value.device.type)
    return _rebuilt(value, lambda item: uproot(item, tensors))


def plant(value: Any, tensors: list[torch.Tensor]) -> Any:
    """A copy of `value` with new tensors for its placeholders; they are appended to `tensors`, to be filled."""
    if isinstance(value, _Placeholder):
        tensor = torch.empty(value.shape, dtype=value.dtype, device=value.device_type)
        tensors.append(tensor)
        return tensor
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

    What is no tensor travels pickled. The others' `value` does not matter. On every rank of `comm`.
    """
    if comm.size == 1:
        return value
    tensors: list[torch.Tensor] = []
    structure = uproot(value, tensors) if comm.rank == root else None
    structure = broadcast_object(comm, structure, root)
    received = value if comm.rank == root else plant(structure, tensors)
    broadcast_tensors(comm, tensors, root)
    return received


def broadcast_optimizer_state(comm: Communicator, optimizer: torch.optim.Optimizer, root: int) -> None:
    """Give every rank the root's hyper-parameters and state, whatever it had before. On every rank of `comm`.

    Follows the root's structure; never takes an optimizer step to create state, which would change parameters.
    """
    if not 0 <= root < comm.size:
        raise ValueError(f"root should be a rank from 0 to {comm.size - 1} and is {root}")
    if comm.size == 1:
        return
    state = broadcast_structure(comm, optimizer.state_dict() if comm.rank == root else None, root)
    if comm.rank != root:
        optimizer.load_state_dict(state)
