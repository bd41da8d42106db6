"""Averages gradients of ``nn.Embedding(sparse=True)``: indices and values are gathered and added on every rank.

They are in no bucket: which rows a rank used is known when its backward is over, so step() tells the others how many,
and gathers. Every rank then updates the whole parameter alike, with the user's optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch

from overlap.core.bucket import Slot
from overlap.core.feature import Feature
from overlap.core.round import GradientChanged
from overlap.core.wire import Exchange
from overlap.transport.communicator import Communicator
from overlap.transport.objects import allgather_object
from overlap.transport.operation import all_gather

__all__ = ["DenseGradients", "SparseGradients"]


class SparseGradients(Feature):
    """The feature that claims parameters with sparse gradients, and averages these when a round is closed.

    `model` has the modules that are looked through; None where the user gave parameters.
    """

    def __init__(
        self, comm: Communicator, slots: Sequence[Slot], exchange: Exchange, model: torch.nn.Module | None
    ) -> None:
        self._comm, self._slots, self._exchange, self._model = comm, slots, exchange, model

    def claims(self, slots: Sequence[Slot]) -> Collection[int]:
        return _find_sparse(self._comm, slots, self._model)

    def closed(self, news: bool, leader: Callable[[], int], factor: Callable[[], float]) -> None:
        _average(self._comm, self._slots, self._exchange, factor)


class DenseGradients(Feature):
    """The feature behind ``sparse_as_dense``: makes sparse gradients dense."""

    def gradient(self, slot: Slot) -> None:
        gradient = slot.param.grad
        if gradient is not None and gradient.layout is not torch.strided:
            slot.param.grad = gradient.to_dense()


def _find_sparse(comm: Communicator, slots: Sequence[Slot], model: torch.nn.Module | None) -> set[int]:
    """Indices of slots with sparse gradients: some rank has one, or a module of `model` announces it. On every rank."""
    mine = {s.index for s in slots if s.param.grad is not None and s.param.grad.layout is torch.sparse_coo}
    modules = () if model is None else model.modules()
    declared = {id(m.weight) for m in modules if _announces(m) and hasattr(m, "weight")}
    mine |= {slot.index for slot in slots if id(slot.param) in declared}
    return set().union(*allgather_object(comm, mine))


def _announces(module: torch.nn.Module) -> bool:
    """As ``nn.Embedding`` does; what other modules call `sparse` may be anything, a buffer too."""
    announced = getattr(module, "sparse", False)
    return isinstance(announced, int) and bool(announced)


def _average(comm: Communicator, slots: Sequence[Slot], exchange: Exchange, correction: Callable[[], float]) -> None:
    """Make ``.grad`` of sparse slots the coalesced average, None where no rank has one. On every rank, once a window.

    `correction()` is asked for a further factor when every rank has said how many rows it has.
    """
    todo = [slot for slot in slots if slot.claimed and not slot.filled]
    if not todo:
        return
    mine = [_coalesced(slot) for slot in todo]
    # No gradient: 0. A gradient with n rows: n + 1.
    rows = torch.tensor([0 if gradient is None else gradient._nnz() + 1 for gradient in mine], device="cpu")
    table = rows.new_empty((comm.size, len(todo)))
    comm.run(all_gather(rows, table.view(-1), label="sparse rows"))
    inflight = []
    for slot, gradient, column in zip(todo, mine, table.T.tolist(), strict=True):
        slot.filled, slot.unused = True, not any(column)
        if slot.unused:
            slot.param.grad = None
            continue
        counts = [max(count - 1, 0) for count in column]
        like = _empty(slot) if gradient is None else gradient
        indices, values = like._indices().T.contiguous(), exchange.narrowed(like._values())
        all_indices = indices.new_empty((sum(counts), indices.shape[1]))
        all_values = values.new_empty((sum(counts), *values.shape[1:]))
        works = []
        for part, whole, kind in ((indices, all_indices, "rows"), (values, all_values, "values")):
            width = whole[:1].numel() if whole.numel() else 0
            numels = [count * width for count in counts]
            works.append(comm.start(all_gather(part, whole, counts=numels, label=f"{slot.name} {kind}")))
        inflight.append((slot, works, all_indices, all_values))
    for slot, works, indices, values in inflight:
        for work in works:
            work.wait()
        wide = values.to(slot.param.dtype) * (exchange.share(comm.size) * correction())
        total = torch.sparse_coo_tensor(indices.T, wide, slot.param.shape, check_invariants=False).coalesce()
        slot.param.grad = total


def _coalesced(slot: Slot) -> torch.Tensor | None:
    gradient = slot.param.grad
    if slot.fires and slot.replaced:
        raise GradientChanged(
            f"the gradient of {slot.name!r} was replaced or changed after backward(), on this rank alone; call "
            "optimizer.synchronize() after backward() and before changing gradients"
        )
    if gradient is not None and gradient.layout is not torch.sparse_coo:
        raise TypeError(
            f"the gradient of {slot.name!r} was sparse in the first iteration and has layout {gradient.layout} now; wrap "
            "the optimizer with sparse_as_dense=True"
        )
    return None if gradient is None else gradient.detach().coalesce()


def _empty(slot: Slot) -> torch.Tensor:
    """A gradient without rows; embeddings have rows along the first dimension."""
    param = slot.param
    values = param.detach().new_empty((0, *param.shape[1:]))
    indices = torch.empty((1, 0), dtype=torch.int64, device=param.device)
    return torch.sparse_coo_tensor(indices, values, param.shape, check_invariants=False).coalesce()
