"""Shards a model whose modules were given to ``fully_shard()``, in the first pass that may train it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdp.optimizer import Fsdp, automatic, refuse_what_is_lost
from fsdp.units import Unit, outermost, root_of, taken, unit_of, units_in
from overlap.horovod.mesh import set_of
from overlap.job.process_set import ProcessSet
from overlap.job.session import current
from overlap.optimizer.adoption import adopt, optimizers_of
from overlap.optimizer.arguments import SharedArguments
from overlap.optimizer.distributed import DistributedOptimizer
from overlap.optimizer.start import agree_on_strategy
from overlap.transport.compression import Compression
from overlap.transport.objects import allgather_object

__all__ = ["WIRES", "begin"]

#: The compression for each `reduce_dtype`; None is that of gradients. Sums are in fp32, or in fp64 of such gradients.
WIRES = {
    None: Compression.none,
    torch.float32: Compression.none,
    torch.float64: Compression.none,
    torch.bfloat16: Compression.bf16,
    torch.float16: Compression.fp16,
}


def begin(module: Any) -> None:
    """Shard the model around `module`, whose forward pass begins, if there is an optimizer that trains it. On every rank.

    Raises ``RuntimeError`` for several optimizers, or one that is distributed already.
    """
    if not torch.is_grad_enabled():
        return
    model = outermost(module)
    if model is not module and unit_of(model).calls:
        return  # that has looked already
    trained = [each for each in model.parameters() if each.requires_grad]
    found = optimizers_of(trained)
    if not found:
        return
    if len(found) > 1 or current().registry.having(trained):
        names = ", ".join(type(each).__name__ for each in found)
        raise RuntimeError(
            f"the parameters of {type(model).__name__} belong to {len(found)} optimizer(s) ({names}), and fully_shard() "
            "works with one that no DistributedOptimizer wraps; it may have several parameter groups"
        )
    agree_on_strategy("fsdp")
    refuse_what_is_lost(model)
    root = root_of(model)
    root.units = units_in([model])
    _refuse_frozen(model, root.units, set(_trained(found[0])))
    for unit in root.units:
        unit.root = root
    _watch_steps()
    arguments = replace(_arguments(root.units, found[0]), process_set=_process_set(root.units))
    root.train(adopt(found[0], model, partial(_strategy, root.units), arguments))


@functools.cache
def _watch_steps() -> None:
    """From now on, look at each optimizer of this process that steps."""
    register_optimizer_step_pre_hook(_refuse_stranger)


def _refuse_stranger(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    """Raise ``RuntimeError`` where `optimizer` is a plain one, made later, of parameters that are sharded."""
    if not isinstance(optimizer, DistributedOptimizer) and not taken(sharded=True).isdisjoint(_trained(optimizer)):
        raise RuntimeError(
            f"{type(optimizer).__name__}.step(): parameters of this optimizer are sharded already, with the one that "
            "their model's first training pass has found. Use that one; add_param_group() adds parameters to it"
        )


def _strategy(units: Sequence[Unit], optimizer: torch.optim.Optimizer) -> Fsdp:
    stay = {id(each) for unit in units if unit.stays for each in unit.parameters}
    numbers = [number for number, each in enumerate(_trained(optimizer)) if each in stay]
    return automatic(optimizer, units[0].threshold_mb, stay=numbers, param_dtype=_one(units, "param_dtype"))


def _arguments(units: Sequence[Unit], optimizer: torch.optim.Optimizer) -> SharedArguments:
    trained = _trained(optimizer)
    inner = [[each for each in unit.parameters if id(each) in trained and each.requires_grad] for unit in units[1:]]
    wire = _one(units, "reduce_dtype") or _one(units, "param_dtype")
    groups = [group for group in inner if group] or None
    return SharedArguments(groups=groups, compression=WIRES[wire], **units[0].arguments)


def _one(units: Sequence[Unit], name: str) -> torch.dtype | None:
    """The type that all `units` have for `name`."""
    found: set[torch.dtype | None] = {getattr(unit, name) for unit in units if unit.parameters}
    if len(found) > 1:
        raise NotImplementedError(f"{name} differs between modules ({found}): give all of them the same")
    return found.pop() if found else None


def _refuse_frozen(model: torch.nn.Module, units: Sequence[Unit], trained: set[int]) -> None:
    """Raise ``NotImplementedError`` where forward would meet a parameter that stays whole, and of another type."""
    names = {id(each): name for name, each in model.named_parameters()}
    for unit in units:
        for each in unit.parameters if unit.param_dtype is not None else ():
            stays = id(each) not in trained or not each.requires_grad
            if stays and each.is_floating_point() and each.dtype is not unit.param_dtype:
                raise NotImplementedError(
                    f"param_dtype is {unit.param_dtype}, and parameter {names.get(id(each))!r}, which is not trained, "
                    f"stays {each.dtype}: convert it, by parameter.data = parameter.data.to({unit.param_dtype})"
                )


def _process_set(units: Sequence[Unit]) -> ProcessSet:
    """The ranks of all `units`. On every rank of the job; raises on all of them where some give others than their peers."""
    session = current()
    mine = list(dict.fromkeys(unit.ranks for unit in units if unit.parameters))
    everyones = allgather_object(session.control, mine)
    for found in everyones:
        if len(found) > 1:
            raise NotImplementedError(
                f"mesh differs between modules: some are sharded over ranks {list(found[0])} and some over "
                f"{list(found[1])}; give all modules of a model the same"
            )
    groups = [found[0] for found in everyones]
    why = _why_no_sets(groups)
    if why is not None:
        raise ValueError(why)
    return set_of(list(dict.fromkeys(groups)))


def _why_no_sets(groups: Sequence[tuple[int, ...]]) -> str | None:
    """What is wrong with the `groups` that ranks give, by rank, where ranks of one do not all give that one (pure)."""
    for rank, group in enumerate(groups):
        if rank not in group:
            return f"rank {rank} is not among the ranks {list(group)} of the mesh that it gives to fully_shard()"
        for other in group:
            if groups[other] != group:
                return (
                    f"rank {rank} shards over ranks {list(group)} and rank {other} over {list(groups[other])}: all ranks "
                    "of a mesh have to give that mesh to fully_shard()"
                )
    return None


def _trained(optimizer: torch.optim.Optimizer) -> dict[int, None]:
    """The ids of its parameters, in the order of their slots."""
    return dict.fromkeys(id(each) for group in optimizer.param_groups for each in group["params"])
