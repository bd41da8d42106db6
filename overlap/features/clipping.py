"""Clips the averaged gradients of an optimizer by their norm, whose parts lie on many ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch

from overlap.core.averages import Averages
from overlap.transport.communicator import Communicator, ReduceOp
from overlap.transport.cuda.math import inspect, prefers_inspect
from overlap.transport.operation import all_reduce

__all__ = ["Clippable", "clip", "clip_sharded", "clip_together", "norm_of", "scale"]

_WHAT = "clipping by a norm over all gradients"


@torch.no_grad()
def clip(
    averages: Averages,
    wanted: Callable[[torch.Tensor], bool],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
) -> torch.Tensor:
    """Clip the averaged gradients of the `wanted` parameters by their total norm, which is returned. On every rank."""
    engine = averages.engine
    params = [slot.param for slot in engine.slots if wanted(slot.param)]
    if averages.whole:
        averages.synchronize("clip_grad_norm_()", _WHAT)
        _refuse_sparse(averages, wanted)
        return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite)
    averages.settle("clip_grad_norm_()", _WHAT)
    _refuse_sparse(averages, wanted)
    engine.participants.announce(
        "clip",
        indices=[slot.index for slot in engine.slots if wanted(slot.param)],
        max_norm=max_norm,
        norm_type=norm_type,
        error_if_nonfinite=error_if_nonfinite,
    )
    pieces = averages.pieces(wanted)
    norm, factor = clip_sharded(
        averages.sharers, pieces, _alike(averages, wanted), params, max_norm, norm_type, error_if_nonfinite
    )
    averages.scaled(factor, wanted)
    return norm


def _refuse_sparse(averages: Averages, wanted: Callable[[torch.Tensor], bool]) -> None:
    sparse = [slot.name for slot in averages.engine.slots if slot.claimed and wanted(slot.param)]
    if sparse:
        raise TypeError(
            f"the gradient of {sparse[0]!r} is sparse, and torch's clip_grad_norm_ takes dense gradients: wrap the "
            "optimizer with sparse_as_dense=True"
        )


def clip_sharded(
    comm: Communicator,
    pieces: Sequence[torch.Tensor],
    alike: Sequence[torch.Tensor],
    params: Sequence[torch.Tensor],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
) -> tuple[torch.Tensor, float]:
    """Scale gradients so that their total norm is at most `max_norm`; returns the norm before, and the factor.

    `pieces` are this rank's share, disjoint from every other rank's; `alike` are gradients that all ranks hold alike.
    Norms are accumulated in fp64; on a GPU squares are added up in one pass over all pieces, the host waits for it once.
    Of which type the norm is, and where it lies, `params` say, whose gradients these are: a rank may have none of them.
    On every rank of `comm`.
    """
    total = _total(comm, pieces, alike, norm_type)
    factor = _factor(total, max_norm, norm_type, error_if_nonfinite)
    if factor != 1.0:
        for gradient in (*pieces, *alike):
            gradient.detach().mul_(factor)
    return _shown(total, params), factor


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
    """The total norm of the averaged gradients of the `wanted` parameters, which lie in shards; fp64. On every rank."""
    averages.settle("clip_grad_norm_()", _WHAT)
    _refuse_sparse(averages, wanted)
    slots = averages.engine.slots
    indices = [slot.index for slot in slots if wanted(slot.param)]
    averages.engine.participants.announce("norm", indices=indices, norm_type=norm_type)
    return _total(averages.comm, averages.pieces(wanted), _alike(averages, wanted), norm_type)


@torch.no_grad()
def scale(averages: Averages, wanted: Callable[[torch.Tensor], bool], factor: float) -> None:
    """Multiply the averaged gradients of the `wanted` parameters, after :func:`norm_of`. On every rank."""
    slots = averages.engine.slots
    indices = [slot.index for slot in slots if wanted(slot.param)]
    averages.engine.participants.announce("scale", indices=indices, factor=factor)
    for gradient in (*averages.pieces(wanted), *_alike(averages, wanted)):
        gradient.detach().mul_(factor)
    averages.scaled(factor, wanted)


def _alike(averages: Averages, wanted: Callable[[torch.Tensor], bool]) -> list[torch.Tensor]:
    return [param.grad for param in averages.alike(wanted) if param.grad is not None]


def _total(
    comm: Communicator, pieces: Sequence[torch.Tensor], alike: Sequence[torch.Tensor], norm_type: float
) -> torch.Tensor:
    """The norm of gradients of which `pieces` are this rank's, and all ranks have those that are `alike`."""
    infinite = math.isinf(norm_type)
    if not (infinite or norm_type > 0):
        raise ValueError(f"norm_type should be above 0 or inf and is {norm_type}")
    counted = [*pieces, *(alike if comm.rank == 0 else ())]
    devices = dict.fromkeys(g.device for g in counted if g.numel())
    shares = [
        _share([g.detach() for g in counted if g.numel() and g.device == device], norm_type).cpu() for device in devices
    ]
    share = torch.zeros(1, dtype=torch.float64, device="cpu")
    if shares:
        together = torch.stack(shares)
        share[0] = together.amax() if infinite else together.sum()
    comm.run(all_reduce(share, share, ReduceOp.MAX if infinite else ReduceOp.SUM, label="gradient norm"))
    return share[0] if infinite else share[0] ** (1.0 / norm_type)


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
