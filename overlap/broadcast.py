"""One rank's values on all ranks: tensors, parameters, optimizer state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from overlap.communicator import Communicator
from overlap.dense import is_dense
from overlap.objects import broadcast_object

__all__ = ["broadcast_optimizer_state", "broadcast_parameters", "broadcast_tensors"]


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
            with torch.no_grad():
                _writable(tensor).copy_(staged)


def _writable(tensor: torch.Tensor) -> torch.Tensor:
    if is_dense(tensor.detach()):
        return tensor.detach()
    # An expanded tensor repeats memory: write each place once.
    where = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())
    return tensor.detach()[where]


def broadcast_parameters(
    comm: Communicator,
    params: Mapping[str, Any] | Iterable[tuple[str, Any]],
    root: int,
) -> None:
    """Overwrite parameters (``model.state_dict()`` or ``model.named_parameters()``) with the root's.

    Entries that are not tensors are left alone, as in Horovod. On every rank of `comm`, with the same names in the same
    order.
    """
    pairs = list(params.items()) if isinstance(params, Mapping) else list(params)
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
        raise ValueError("params should be a state_dict or pairs (name, tensor)")
    broadcast_tensors(comm, [value.data for _, value in pairs if isinstance(value, torch.Tensor)], root)


@dataclass(frozen=True)
class _Placeholder:
    """Stands for a tensor in a structure that travels without its tensors."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device_type: str


def _take_out(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        tensors.append(value.detach())
        return _Placeholder(tuple(value.shape), value.dtype, value.device.type)
    if isinstance(value, Mapping):
        return {key: _take_out(item, tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_take_out(item, tensors) for item in value)
    return value


def _put_back(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, _Placeholder):
        tensor = torch.empty(value.shape, dtype=value.dtype, device=value.device_type)
        tensors.append(tensor)
        return tensor
    if isinstance(value, Mapping):
        return {key: _put_back(item, tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_put_back(item, tensors) for item in value)
    return value


def broadcast_optimizer_state(comm: Communicator, optimizer: torch.optim.Optimizer, root: int) -> None:
    """Give every rank the root's hyper-parameters and state, whatever it had before. On every rank of `comm`.

    Follows the root's structure; never takes an optimizer step to create state, which would change parameters.
    """
    if not 0 <= root < comm.size:
        raise ValueError(f"root should be a rank from 0 to {comm.size - 1} and is {root}")
    if comm.size == 1:
        return
    tensors: list[torch.Tensor] = []
    structure = _take_out(optimizer.state_dict(), tensors) if comm.rank == root else None
    structure = broadcast_object(comm, structure, root)
    if comm.rank != root:
        loaded = _put_back(structure, tensors)
    broadcast_tensors(comm, tensors, root)
    if comm.rank != root:
        optimizer.load_state_dict(loaded)
