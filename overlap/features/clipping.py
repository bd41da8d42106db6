"""Clips the averaged gradients of an optimizer by their norm, whose parts lie on many ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

import torch

from overlap.core.averages import Averages
from overlap.job.axes import Axis, axes_of
from overlap.transport.communicator import Communicator, ReduceOp
from overlap.transport.cuda.math import inspect, prefers_inspect
from overlap.transport.operation import all_reduce

__all__ = ["Clippable", "clip", "clip_together", "norm_of", "scale"]

_WHAT = "clipping by a norm over all gradients"


@torch.no_grad()
def clip(
    averages: Averages,
    wanted: Callable[[torch.Tensor], bool],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
) -> torch.Tensor:
    """Clip the averaged gradients of the `wanted` parameters by their total norm, which is returned. On every rank.

    Norms are accumulated in fp64; on a GPU squares are added up in one pass over all gradients, the host waits for it once.
    Of parameters that are parts along axes of a mesh, the norm is that of all parts.
    """
    engine = averages.engine
    params = [slot.param for slot in engine.slots if wanted(slot.param)]
    _settle(averages, wanted)
    if averages.whole and not axes_of(params):
        return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite)
    engine.participants.announce(
        "clip",
        indices=[slot.index for slot in engine.slots if wanted(slot.param)],
        max_norm=max_norm,
        norm_type=norm_type,
        error_if_nonfinite=error_if_nonfinite,
    )
    total = _total(averages, averages.sharers, wanted, norm_type)
    factor = _factor(total, max_norm, norm_type, error_if_nonfinite)
    if factor != 1.0:
        _multiply(averages, wanted, factor)
    return _shown(total, params)


def _settle(averages: Averages, wanted: Callable[[torch.Tensor], bool]) -> None:
    (averages.synchronize if averages.whole else averages.settle)("clip_grad_norm_()", _WHAT)
    _refuse_sparse(averages, wanted)


def _refuse_sparse(averages: Averages, wanted: Callable[[torch.Tensor], bool]) -> None:
    sparse = [slot.name for slot in averages.engine.slots if slot.claimed and wanted(slot.param)]
    if sparse:
        raise TypeError(
            f"the gradient of {sparse[0]!r} is sparse, and torch's clip_grad_norm_ takes dense gradients: wrap the "
            "optimizer with sparse_as_dense=True"
        )


class Clippable(Protocol):
    """Gradients of an optimizer that lie in shards: their norm, and how they are multiplied. On every rank."""

    def _norm(self, wanted: Callable[[torch.Tensor], bool], norm_type: float) -> torch.Tensor: ...
    def _scale(self, wanted: Callable[[torch.Tensor], bool], factor: float) -> None: ...


def clip_together(
    optimizers: Iterable[Clippable],
    params: Sequence[torch.Tensor],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
) -> torch.Tensor:
    """Clip the averaged gradients of `params`, of several optimizers, by their total norm, which is returned.

    On every rank.
    """
    chosen, several = {id(param) for param in params}, list(optimizers)
    norms = torch.stack([each._norm(lambda param: id(param) in chosen, norm_type) for each in several])
    total = torch.linalg.vector_norm(norms, norm_type)
    factor = _factor(total, max_norm, norm_type, error_if_nonfinite)
    for each in several if factor != 1.0 else ():
        each._scale(lambda param: id(param) in chosen, factor)
    return _shown(total, params)


@torch.no_grad()
def norm_of(averages: Averages, wanted: Callable[[torch.Tensor], bool], norm_type: float) -> torch.Tensor:
    """The total norm of the averaged gradients of the `wanted` parameters; fp64. On every rank."""
    _settle(averages, wanted)
    slots = averages.engine.slots
    indices = [slot.index for slot in slots if wanted(slot.param)]
    averages.engine.participants.announce("norm", indices=indices, norm_type=norm_type)
    return _total(averages, averages.comm, wanted, norm_type)


@torch.no_grad()
def scale(averages: Averages, wanted: Callable[[torch.Tensor], bool], factor: float) -> None:
    """Multiply the averaged gradients of the `wanted` parameters, after :func:`norm_of`. On every rank."""
    slots = averages.engine.slots
    indices = [slot.index for slot in slots if wanted(slot.param)]
    averages.engine.participants.announce("scale", indices=indices, factor=factor)
    _multiply(averages, wanted, factor)


def _multiply(averages: Averages, wanted: Callable[[torch.Tensor], bool], factor: float) -> None:
    pieces, alike = _gradients(averages, wanted)
    for gradient in (*pieces, *alike):
        gradient.detach().mul_(factor)
    if not averages.whole:
        averages.scaled(factor, wanted)


def _gradients(
    averages: Averages, wanted: Callable[[torch.Tensor], bool]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Averages of the `wanted` parameters: those that no other rank has, and those that all have alike."""
    if averages.whole:
        params = [slot.param for slot in averages.engine.slots if wanted(slot.param)]
        return [], [param.grad for param in params if param.grad is not None]
    return averages.pieces(wanted), [param.grad for param in averages.alike(wanted) if param.grad is not None]


def _total(
    averages: Averages, comm: Communicator, wanted: Callable[[torch.Tensor], bool], norm_type: float
) -> torch.Tensor:
    """The norm of the gradients of the `wanted` parameters, divided among the ranks of `comm`; fp64, on the CPU.

    Parameters that are parts along the same axes of a mesh are counted together, by `comm`, then along each axis.
    """
    infinite = math.isinf(norm_type)
    if not (infinite or norm_type > 0):
        raise ValueError(f"norm_type should be above 0 or inf and is {norm_type}")
    op = ReduceOp.MAX if infinite else ReduceOp.SUM
    params = [slot.param for slot in averages.engine.slots if wanted(slot.param)]
    kinds: dict[frozenset[Axis], set[int]] = {frozenset(): set()}  # the ids of parameters, by their axes
    for param in params:
        kinds.setdefault(frozenset(axes_of([param])), set()).add(id(param))
    shares = torch.zeros(len(kinds), dtype=torch.float64, device="cpu")
    for number, ids in enumerate(kinds.values()):
        found = _counted(averages, comm, ids, norm_type)
        if found is not None:
            shares[number] = found
    comm.run(all_reduce(shares, shares, op, label="gradient norm"))
    by_kind = {kind: shares[number] for number, kind in enumerate(kinds)}
    for axis in axes_of(params):
        along = [kind for kind in by_kind if axis in kind]
        values = torch.stack([by_kind.pop(kind) for kind in along])
        axis.comm.run(all_reduce(values, values, op, label="gradient norm"))
        for kind, value in zip(along, values, strict=True):
            before = by_kind.get(kind - {axis}, torch.zeros_like(value))
            by_kind[kind - {axis}] = torch.maximum(before, value) if infinite else before + value
    share = by_kind[frozenset()]
    return share if infinite else share ** (1.0 / norm_type)


def _counted(averages: Averages, comm: Communicator, ids: Collection[int], norm_type: float) -> torch.Tensor | None:
    """What this rank counts of the gradients of the parameters with these `ids`; fp64, on the CPU. None: nothing."""
    pieces, alike = _gradients(averages, lambda param: id(param) in ids)
    counted = [each.detach() for each in (*pieces, *(alike if comm.rank == 0 else ())) if each.numel()]
    devices = dict.fromkeys(gradient.device for gradient in counted)
    shares = [_share([g for g in counted if g.device == device], norm_type).cpu() for device in devices]
    if not shares:
        return None
    return torch.stack(shares).amax() if math.isinf(norm_type) else torch.stack(shares).sum()


def _factor(total: torch.Tensor, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> float:
    """By which gradients of this norm are multiplied; a NaN must reach them as it does in one process."""
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"the total norm of order {norm_type} of the gradients is {float(total)}, not finite; "
            "error_if_nonfinite=False clips by it all the same"
        )
    factor = float(max_norm) / (float(total) + 1e-6)
    return 1.0 if factor >= 1.0 else factor


def _shown(total: torch.Tensor, params: Sequence[torch.Tensor]) -> torch.Tensor:
    return total.to(params[0].device if params else total.device, _norm_dtype(params))


def _share(gradients: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Of gradients on one device: the sum of all sizes to the power of `norm_type`, the greatest size if that is inf."""
    ours = [g for g in gradients if norm_type == 2 and prefers_inspect(g)]
    norms = [
        torch.linalg.vector_norm(g, norm_type).double() for g in gradients if norm_type != 2 or not prefers_inspect(g)
    ]
    if math.isinf(norm_type):
        return torch.stack(norms).amax()
    powers = [norm**norm_type for norm in norms]
    if ours:
        powers.append(inspect(ours)[0])
    return torch.stack(powers).sum()


def _norm_dtype(params: Sequence[torch.Tensor]) -> torch.dtype:
    return torch.float64 if any(p.dtype in (torch.float64, torch.complex128) for p in params) else torch.float32
