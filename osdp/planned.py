"""Plans under a memory limit without training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch

from osdp.choice import whole_bytes
from osdp.job import Sized, TimedLayer, job_of
from osdp.memory_plan import GB, MemoryPlan, made, pinned_by
from overlap.job.memory import resident_bytes
from overlap.plan.cost_model import CostModel
from overlap.plan.fusion import limits
from overlap.plan.partition import TensorSpec, fuse
from overlap.plan.plan import Residency

__all__ = ["plan"]

_AHEAD = 4  # buckets of the usual size, as in training


def plan(
    model: torch.nn.Module,
    *,
    memory_limit_gb: float,
    ranks: int,
    state_per_parameter: float = 2.0,
    activations_gb: float = 0.0,
    other_gb: float | None = None,
    backward_passes_per_step: int = 1,
    layer_times: Mapping[str, tuple[float, float]] | None = None,
    alpha_beta: tuple[float, float] | None = None,
    fsdp_plan: Mapping[Any, str] | Literal["model"] | None = None,
    threshold_mb: float | Literal["auto"] = "auto",
    whole_mb: float | Literal["auto"] = "auto",
) -> MemoryPlan:
    """The plan of ``osdp.DistributedOptimizer`` for `model` on so many `ranks`, from its sizes. Nothing trains.

    Args:
        model: on the CPU or the meta device.
        memory_limit_gb: GB (2^30 bytes) of a rank's process.
        ranks: among which parameters, gradients and state are sharded.
        state_per_parameter: values of the optimizer's state for each: 2 for Adam and AdamW, 1 for SGD with momentum.
        activations_gb: what passes take beside parameters and gradients. Training measures it.
        other_gb: what a process has without the model. None: what this one has now, less the model.
        backward_passes_per_step: as in training.
        layer_times: seconds of forward and backward by the name of each module that has parameters.
        alpha_beta: seconds to start an all-reduce, and seconds per byte. Without it or `layer_times`, what is made least
            are the bytes on the wire.
        fsdp_plan: this, `threshold_mb` and `whole_mb`: as for ``osdp.DistributedOptimizer``.

    Raises :class:`osdp.search.DoesNotFit`, a ``ValueError`` that says by how much, where not even all freed fits.
    """
    names, parameters, units = _units(model)
    nbytes = sum(each.nbytes for each in parameters)
    threshold, layers = limits(threshold_mb, None, nbytes)
    specs = [TensorSpec(each.numel(), each.element_size(), str(each.dtype)) for each in parameters]
    fused = fuse(
        units, specs, ranks, threshold_bytes=None if threshold is None else threshold * 2**20, num_nearby_units=layers
    )
    buckets = [
        Sized(
            spec.padded_numel * specs[spec.tensors[0]].itemsize,
            len(spec.tensors),
            tuple(dict.fromkeys(names[index].rpartition(".")[0] for index in spec.tensors)),
        )
        for spec in fused
    ]
    sizes = sorted(each.nbytes for each in buckets)
    room = _AHEAD * sizes[len(sizes) // 2] if whole_mb == "auto" else int(whole_mb * 2**20)
    timed = _timed(layer_times, names, parameters)
    cost = None if alpha_beta is None else CostModel(*alpha_beta)
    job = job_of(buckets, timed, cost, ranks=ranks, room=room, passes=backward_passes_per_step)
    own = sum(each.nbytes for each in parameters if each.device.type != "meta")
    other = resident_bytes() - own if other_gb is None else round(other_gb * GB)
    shares = round(sum(sizes) / ranks * (2 + state_per_parameter))
    freed = (Residency.FREED,) * len(buckets)
    passes = max(0, other) + shares + round(activations_gb * GB) + whole_bytes(job, freed) + min(room, sum(sizes))
    modules = tuple(each.modules for each in buckets)
    rules = getattr(model, "_fsdp_plan", None) or {} if fsdp_plan == "model" else fsdp_plan or {}
    limit = round(memory_limit_gb * GB)
    timed_too = bool(timed) and cost is not None
    pinned = pinned_by(rules, modules)
    return made(MemoryPlan(job, freed, ranks, limit, passes, max(0, other) + shares, modules, timed_too, pinned))


def _units(model: torch.nn.Module) -> tuple[list[str], list[torch.nn.Parameter], list[tuple[int, ...]]]:
    """Names and values of the parameters that are trained, each once, and which of them a module has."""
    names: list[str] = []
    parameters: list[torch.nn.Parameter] = []
    units: list[tuple[int, ...]] = []
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        mine = []
        for name, parameter in module.named_parameters(prefix, recurse=False):
            if parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                mine.append(len(names))
                names.append(name)
                parameters.append(parameter)
        if mine:
            units.append(tuple(mine))
    if not units:
        raise ValueError(f"{type(model).__name__} has no parameters that are trained: there is nothing to plan")
    return names, parameters, units


def _timed(
    layer_times: Mapping[str, tuple[float, float]] | None, names: list[str], parameters: list[torch.nn.Parameter]
) -> list[TimedLayer]:
    sizes: dict[str, list[int]] = {}
    for name, parameter in zip(names, parameters, strict=True):
        sizes.setdefault(name.rpartition(".")[0], []).append(parameter.nbytes)
    times = {} if layer_times is None else layer_times
    return [(name, *times[name], tuple(sizes[name])) for name in sizes if name in times]
