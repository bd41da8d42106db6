"""The units that fairscale's wrappers make: which is inside which, over which ranks, and which train together."""

from __future__ import annotations

import gc
from typing import Any

import torch

from fsdp.fully_shard import fully_shard
from fsdp.options import Options, check_reduced_by
from fsdp.units import has_unit, outermost, outermost_with, unit_of, units_in, unregister
from overlap.horovod.job import init
from overlap.job.groups import ShardGroups
from overlap.job.session import current, is_initialized
from overlap.optimizer.adoption import optimizers_of

__all__ = ["members", "shard", "train_together"]


def shard(module: Any, options: Options, ranks: Any, two_level: ShardGroups = None) -> torch.nn.Module:
    """Make `module` a unit, for now the outermost one, over the `ranks`, or as ``fully_shard(mesh=…)`` takes them.

    Of the outermost one, `two_level` many ranks make up a host, within which and between which operations go.
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"FullyShardedDataParallel takes a module and was given {module!r}")
    options.check_types(module)
    for each in [each for each in module.modules() if has_unit(each) and unit_of(each).rest]:
        unregister(each)  # what no wrapper has is this one's
    for unit in units_in([module]):
        inner = unit.options
        if inner is not None:
            if unit.parameters:
                options.check_inside(inner, unit.kind.__name__)
            unit.stays, unit.casts = not inner.reshard_after_forward, False
    fully_shard(
        module,
        mesh=ranks,
        reshard_after_forward=options.reshard_after_forward,
        mp_policy=options.precision,
        offload_policy=options.offload_policy,
    )
    unit = unit_of(module)
    unit.options, unit.two_level = options, two_level
    unit.stays = options.disable_reshard_on_root or not options.reshard_after_forward
    unit.threshold_mb, unit.arguments = options.bucket_cap_mb, options.arguments
    return module


def members(process_group: Any, reduced_by: Any, mesh: Any) -> Any:
    """The ranks of the job to shard over, as ``fully_shard(mesh=…)`` takes them; this process joins the job."""
    if not is_initialized():
        init()
    if process_group is None:
        check_reduced_by(reduced_by, None)
        return mesh
    if mesh is not None:
        raise ValueError("process_group and mesh are both the ranks to shard over: give one of them")
    if not isinstance(process_group, torch.distributed.ProcessGroup):
        raise TypeError(
            "process_group should be one of torch.distributed's with this rank in it, as new_group() gives to its members, "
            f"and is {process_group!r}"
        )
    found = torch.distributed.get_process_group_ranks(process_group)
    check_reduced_by(reduced_by, found)
    comm = current().comm
    if (torch.distributed.get_rank(), torch.distributed.get_world_size()) != (comm.rank, comm.size):
        raise ValueError(
            f"this is rank {torch.distributed.get_rank()} of {torch.distributed.get_world_size()} in torch.distributed's "
            f"default group and rank {comm.rank} of {comm.size} in the job: give a dear.Mesh as mesh"
        )
    return (tuple(sorted(found)),)


def train_together(module: torch.nn.Module) -> None:
    """Make one model of all units that the optimizer of `module` trains, whose first training pass may begin here.

    Where a script has wrapped parts of a model and not the model, the module around all of them becomes one that is
    sharded, too. Raises ``RuntimeError`` where there is none.
    """
    unit, model = unit_of(module), outermost(module)
    if unit.optimizers or unit_of(model).calls:
        return
    found = optimizers_of([each for each in model.parameters() if each.requires_grad])
    if len(found) != 1 or current().registry.having(list(model.parameters())):
        return  # nothing to do yet, or refused by who looks next
    trained = {id(each) for group in found[0].param_groups for each in group["params"]}
    models = outermost_with(trained)
    if len(models) < 2:
        return
    around = _smallest_around(models)
    if around is None:
        names = ", ".join(sorted(unit_of(each).kind.__name__ for each in models))
        raise RuntimeError(
            f"one optimizer trains {names}, which are wrapped and in no module together: put them into one, such as "
            "torch.nn.ModuleList, or give each an optimizer of its own"
        )
    shard(around, unit_of(model).options or Options(), unit.groups, unit_of(model).two_level)
    unit_of(around).rest = True


def _smallest_around(models: list[torch.nn.Module]) -> torch.nn.Module | None:
    """The module with the fewest parts that has all `models` in it; looks at every object of this process."""
    wanted = set(models)
    found = [
        each
        for each in gc.get_objects()
        if issubclass(type(each), torch.nn.Module) and "_modules" in vars(each) and wanted.issubset(each.modules())
    ]
    return min(found, key=lambda each: sum(1 for _ in each.modules()), default=None)
