"""Lets torch.amp.GradScaler, unmodified, work on gradients that are still local when it reads them.

[Note: one verdict on infinities]
scaler.step(optimizer) asks for `_step_supports_amp_scaling`, then reads `.grad` on every rank by itself, then calls
step() with `grad_scale` and `found_inf` set. So when it asks, reductions are settled, all ranks agree whether any
average is infinite or NaN, and each shows an infinity in `.grad` if so: all scalers skip, or none. The averages are
unscaled inside step(), shards where they lie.

scaler.unscale_(optimizer), called by the script, asks for nothing but `param_groups`: who reads it from there finds the
averages in `.grad`, as after synchronize(), to be unscaled, clipped and looked at as in one process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import FrameType

import torch

from overlap.core.averages import Averages
from overlap.core.bucket import Slot
from overlap.core.round import Stage
from overlap.job.axes import axes_of
from overlap.transport.communicator import Communicator, ReduceOp
from overlap.transport.cuda.math import inspect, prefers_inspect
from overlap.transport.memory import values_of
from overlap.transport.operation import all_reduce

__all__ = ["is_scaler_step", "is_unscaling", "reveal_along_axes", "reveal_infinities", "scale_of"]

_LOOK = "a GradScaler's look at all gradients"


def is_unscaling(caller: FrameType) -> bool:
    """Whether a GradScaler (or one derived from it) reads gradients to unscale or check them."""
    return _asking(caller).f_code.co_name == "_unscale_grads_"


def is_scaler_step(caller: FrameType) -> bool:
    """Whether ``GradScaler.step()`` asks; other callers only want to know what the optimizer can do."""
    asking = _asking(caller)
    return asking.f_code.co_name == "step" and asking.f_globals.get("__name__") == "torch.amp.grad_scaler"


def scale_of(caller: FrameType) -> torch.Tensor | None:
    """The factor by which the GradScaler that asks has multiplied the loss; None where it does not say."""
    found = getattr(_asking(caller).f_locals.get("self"), "_scale", None)
    return found if isinstance(found, torch.Tensor) else None


def _asking(caller: FrameType) -> FrameType:
    """Behind the properties of an optimizer that hands questions on to ours (OSS)."""
    while caller.f_code.co_name in ("param_groups", "_step_supports_amp_scaling") and caller.f_back is not None:
        caller = caller.f_back
    return caller


@torch.no_grad()
def reveal_infinities(averages: Averages) -> None:
    """Before a GradScaler looks for infinities in ``.grad``, let every rank's gradients show those of all ranks.

    On every rank.
    """
    engine = averages.engine
    if averages.whole:
        averages.synchronize("a GradScaler's step", _LOOK)
    if averages.stage is Stage.SYNCHRONIZED:
        reveal_along_axes(averages)
    if averages.stage in (Stage.SYNCHRONIZED, Stage.SHOWN):
        return
    averages.settle("a GradScaler's step", _LOOK)
    engine.participants.announce("reveal")
    whole = [values_of(param.grad) for param in averages.alike() if param.grad is not None]
    comms = [averages.comm, *_along_axes(averages)]
    bad = _any_nonfinite(comms, [*(b.gradients.shard for b in engine.order if b.sharded), *whole])
    engine.round.hidden = [
        slot for slot in engine.slots if slot.freed is not None and slot.param.grad is slot.freed.sent
    ]
    for slot in engine.round.hidden:
        slot.param.grad = None  # it stands for one in shards, and a scaler would write to it
    _show_infinity(bad, engine.slots)
    engine.round.advance(Stage.SHOWN)


@torch.no_grad()
def reveal_along_axes(averages: Averages) -> None:
    """Once ``.grad`` is the average, let it show the infinities of ranks that have other parts of the parameters.

    On every rank. Without such ranks it does nothing.
    """
    comms = _along_axes(averages)
    slots = averages.engine.slots
    if comms and _any_nonfinite(comms, [values_of(slot.param.grad) for slot in slots if slot.param.grad is not None]):
        _show_infinity(True, slots)


def _along_axes(averages: Averages) -> list[Communicator]:
    return [axis.comm for axis in axes_of(slot.param for slot in averages.engine.slots)]


def _any_nonfinite(comms: Iterable[Communicator], gradients: Iterable[torch.Tensor]) -> bool:
    """Whether any rank holds an infinity or a NaN. On every rank of each of `comms`, one after the other."""
    given = [gradient for gradient in gradients if gradient.numel()]
    on_device = [gradient for gradient in given if prefers_inspect(gradient)]
    found = bool(on_device) and bool(inspect(on_device)[1])  # the host waits for the device once
    found = found or any(
        not bool(torch.isfinite(torch.linalg.vector_norm(gradient, float("inf"))))
        for gradient in given
        if not prefers_inspect(gradient)
    )
    flag = torch.tensor([float(found)], device="cpu")
    for comm in comms:
        comm.run(all_reduce(flag, flag, ReduceOp.MAX, label="infinities"))
    return bool(flag)


def _show_infinity(bad: bool, slots: Sequence[Slot]) -> None:
    """Write an infinity into some ``.grad`` if `bad`; have a ``.grad`` in any case, since a scaler insists on one.

    Sparse gradients show theirs by themselves: they are averages already, the same on every rank.
    """
    in_buckets = [
        slot for slot in slots if slot.view is not None and slot.param.numel() and not slot.param.is_complex()
    ]
    if not in_buckets:
        return
    chosen = next((slot for slot in in_buckets if slot.param.grad is not None), in_buckets[0])
    if chosen.param.grad is None:
        chosen.param.grad = chosen.view if chosen.freed is None else torch.zeros_like(chosen.like)
    if bad:
        assert chosen.param.grad is not None
        chosen.param.grad[(0,) * chosen.param.dim()] = float("inf")
