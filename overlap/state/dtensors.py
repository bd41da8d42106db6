"""Tensors as torch's FSDP2 shows them: ``DTensor`` in rows, one range of dimension 0 on each rank; and back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from overlap.core.gates.gates import Ours

__all__ = ["TakesDTensors", "as_dtensor", "before_loading", "rows_of", "taking_dtensors"]


def rows_of(count: int, rank: int, size: int) -> tuple[int, int]:
    """The rows [start, stop) of `rank` among `size`, of `count`, as ``torch.chunk`` has them: the last may have none."""
    each = -(-count // size)
    return min(count, rank * each), min(count, (rank + 1) * each)


def as_dtensor(whole: torch.Tensor, mesh: Any, rank: int) -> torch.Tensor:
    """A ``DTensor`` over the one-dimensional `mesh`, of which this is `rank`, with a copy of this rank's rows of `whole`.

    ``Shard(0)``; a tensor without dimensions is ``Replicate()``. Elements lie row by row, whatever the layout of `whole`.
    """
    from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

    mine, placement = whole.detach(), Replicate() if whole.dim() == 0 else Shard(0)
    placements: list[Placement] = [placement]
    if whole.dim():
        start, stop = rows_of(whole.shape[0], rank, mesh.size())
        mine = mine[start:stop]
    mine = mine.clone(memory_format=torch.contiguous_format)
    stride = torch.empty(whole.shape, device="meta").stride()
    made: torch.Tensor = DTensor.from_local(
        mine, mesh, placements, run_check=False, shape=whole.shape, stride=tuple(stride)
    )
    return made


class TakesDTensors(Ours):
    """Runs before a module loads: a DTensor for one of its own tensors is gathered, on every rank of its mesh."""

    def __call__(self, found: dict[str, Any], prefix: str, *_others: Any) -> None:
        for name, value in found.items():
            if name.startswith(prefix) and "." not in name[len(prefix) :] and hasattr(value, "full_tensor"):
                with torch.no_grad():
                    found[name] = value.detach().full_tensor()


@contextmanager
def taking_dtensors(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """A context in which ``load_state_dict()`` of `modules` takes DTensors."""
    handles = [before_loading(module, TakesDTensors()) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def before_loading(module: torch.nn.Module, hook: Ours) -> RemovableHandle:
    """As ``register_load_state_dict_pre_hook``, which wraps `hook`: copies of `module` would take it along."""
    hooks: Any = module._load_state_dict_pre_hooks
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle
