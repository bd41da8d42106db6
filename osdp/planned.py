"""Plans under a memory limit without training."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any, Literal

import torch

from osdp.choice import whole_bytes
from osdp.job import Sized, TimedLayer, job_of
from osdp.memory_plan import GB, OUTSIZED, MemoryPlan, made, pinned_by
from osdp.search import DoesNotFit
from osdp.slices import split, splittable
from overlap.job.memory.counted import resident_bytes
from overlap.plan.cost_model import CostModel
from overlap.plan.fusion import limits
from overlap.plan.partition import TensorSpec, fuse
from overlap.plan.plan import Residency

__all__ = ["plan"]

_ROUNDING = 1 + 1e-6
_SAME = 1.001  # times that are nearer to each other than this are the same: the fewest slices are taken
_AHEAD = 4  # buckets of the usual size, as in training


def plan(
    model: torch.nn.Module,
    *,
    memory_limit_gb: float,
    ranks: int,
    state_per_parameter: float = 2.0,
    activations_gb: float = 0.0,
    saved_gb: Mapping[str, float] | None = None,
    other_gb: float | None = None,
    backward_passes_per_step: int = 1,
    layer_times: Mapping[str, tuple[float, float]] | None = None,
    alpha_beta: tuple[float, float] | None = None,
    fsdp_plan: Mapping[Any, str] | Literal["model"] | None = None,
    threshold_mb: float | Literal["auto"] = "auto",
    whole_mb: float | Literal["auto"] = "auto",
    slices: Mapping[str, int] | Literal["auto"] | None = None,
    ranks_per_host: int = 1,
) -> MemoryPlan:
    """The plan of ``osdp.DistributedOptimizer`` for `model` on so many `ranks`, from its sizes. Nothing trains.

    Args:
        model: on the CPU or the meta device.
        memory_limit_gb: GB (2^30 bytes) of a rank's process.
        ranks: among which parameters, gradients and state are sharded.
        state_per_parameter: values of the optimizer's state for each: 2 for Adam and AdamW, 1 for SGD with momentum.
        activations_gb: what passes take beside parameters and gradients. Training measures it.
        saved_gb: of these, what each block saves for backward that may be computed again, by the name of its module.
        other_gb: what a process has without the model. None: what this one has now, less the model.
        backward_passes_per_step: as in training.
        layer_times: seconds of forward and backward by the name of each module that has parameters.
        alpha_beta: seconds to start an all-reduce, and seconds per byte. Without it or `layer_times`, what is made least
            are the bytes on the wire.
        fsdp_plan: this, `threshold_mb` and `whole_mb`: as for ``osdp.DistributedOptimizer``.
        slices: into how many slices linear layers are to be split, by name. ``"auto"``: those larger than four buckets of
            the median size, into as few as make the step shortest; ``osdp.split(model, plan.slices)`` does it. None: none.
        ranks_per_host: where it is more than 1, buckets may lie once on each host, as with ``residency="host"``.

    Raises :class:`osdp.search.DoesNotFit`, a ``ValueError`` that says by how much, where not even all freed fits.
    """
    options = {name: value for name, value in locals().items() if name not in ("model", "other_gb", "slices")}
    if ranks_per_host < 1 or ranks % ranks_per_host:
        raise ValueError(f"ranks_per_host={ranks_per_host} does not divide ranks={ranks}: give a divisor of {ranks}")
    own = sum(each.nbytes for each in _units(model)[1] if each.device.type != "meta")
    other = max(0, resident_bytes() - own if other_gb is None else round(other_gb * GB))
    if slices != "auto":
        return _plan(model, other, slices or {}, **options)
    found: list[MemoryPlan] = []
    for ways in _ways(model, options["threshold_mb"], ranks):
        try:
            found.append(_plan(model, other, ways, **options))
        except DoesNotFit as error:
            problem = error
    if not found:
        raise problem
    shortest = min(plan.seconds for plan in found)
    return next(plan for plan in found if plan.seconds <= _SAME * shortest)


def _plan(
    model: torch.nn.Module,
    other: int,
    slices: Mapping[str, int],
    *,
    memory_limit_gb: float,
    ranks: int,
    state_per_parameter: float,
    activations_gb: float,
    saved_gb: Mapping[str, float] | None,
    backward_passes_per_step: int,
    layer_times: Mapping[str, tuple[float, float]] | None,
    alpha_beta: tuple[float, float] | None,
    fsdp_plan: Mapping[Any, str] | Literal["model"] | None,
    threshold_mb: float | Literal["auto"],
    whole_mb: float | Literal["auto"],
    ranks_per_host: int,
) -> MemoryPlan:
    """With these `slices`; a process has `other` bytes without the model."""
    layer_times = dict(layer_times or {})
    if slices:
        model = _on_meta(model)
        split(model, slices)
        for name, count in slices.items():
            forward, backward = layer_times.pop(name, (0.0, 0.0))
            layer_times |= {f"{name}.slices.{n}": (forward / count, backward / count) for n in range(count)}
    buckets, names, parameters = _buckets(model, threshold_mb, ranks)
    sizes = sorted(each.nbytes for each in buckets)
    room = _AHEAD * sizes[len(sizes) // 2] if whole_mb == "auto" else int(whole_mb * 2**20)
    timed = _timed(layer_times, names, parameters)
    cost = None if alpha_beta is None else CostModel(*alpha_beta)
    saved = {name: round(gb * GB) for name, gb in (saved_gb or {}).items()}
    _refuse_unknown(saved, model)
    passes = backward_passes_per_step
    job = job_of(buckets, timed, cost, ranks=ranks, room=room, passes=passes, saved=saved, per_host=ranks_per_host)
    shares = round(sum(sizes) / ranks * (2 + state_per_parameter))
    freed = (Residency.FREED,) * len(buckets)
    of_blocks = sum(block.nbytes for block in job.blocks)
    if of_blocks > activations_gb * GB * _ROUNDING:
        raise ValueError(
            f"saved_gb has {of_blocks / GB:.3g} GB in all blocks, and activations_gb={activations_gb:.3g} is all of it: "
            "give at least as much"
        )
    kept = round(activations_gb * GB) - of_blocks  # whole_bytes() has that of blocks
    in_passes = other + shares + kept + whole_bytes(job, freed) + min(room, sum(sizes))
    modules = tuple(each.modules for each in buckets)
    rules = getattr(model, "_fsdp_plan", None) or {} if fsdp_plan == "model" else fsdp_plan or {}
    limit = round(memory_limit_gb * GB)
    timed_too = bool(timed) and cost is not None
    pinned = pinned_by(rules, modules)
    in_step = other + shares
    return made(MemoryPlan(job, freed, ranks, limit, in_passes, in_step, modules, timed_too, pinned, slices=slices))


def _ways(model: torch.nn.Module, threshold_mb: float | Literal["auto"], ranks: int) -> Iterator[dict[str, int]]:
    """No slices, and then ever smaller ones of all linear layers that are larger than their limit."""
    usual = median(bucket.nbytes for bucket in _buckets(model, threshold_mb, ranks)[0])
    large = {name: layer.weight.nbytes for name, layer in splittable(model)}
    large = {name: nbytes for name, nbytes in large.items() if nbytes > OUTSIZED * usual}
    yield {}
    most, count = max(large.values(), default=0), 2
    while most / count >= usual:
        yield {name: -(-nbytes * count // most) for name, nbytes in large.items() if nbytes * count > most}
        count *= 2


def _on_meta(model: torch.nn.Module) -> torch.nn.Module:
    """A copy without memory."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        empty = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = torch.nn.Parameter(empty, requires_grad=parameter.requires_grad)
    memo.update({id(buffer): torch.empty_like(buffer, device="meta") for buffer in model.buffers()})
    return copy.deepcopy(model, memo)


def _buckets(
    model: torch.nn.Module, threshold_mb: float | Literal["auto"], ranks: int
) -> tuple[list[Sized], list[str], list[torch.nn.Parameter]]:
    """The buckets of `model`, and names and values of its parameters."""
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
    return buckets, names, parameters


def _refuse_unknown(saved: Mapping[str, int], model: torch.nn.Module) -> None:
    known = {name for name, _ in model.named_modules()}
    unknown = [name for name in saved if name not in known]
    if unknown:
        raise ValueError(f"saved_gb has {', '.join(unknown)}, and {type(model).__name__} has no modules of these names")


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
