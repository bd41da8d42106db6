"""Shards a model whose modules were given to ``fully_shard()``, in the first pass that may train it."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch

from fsdp.optimizer import Fsdp, automatic
from fsdp.units import Unit, outermost, root_of, taken, unit_of, units_in
from overlap.horovod.mesh import set_of
from overlap.job.default_ranks import Place, place
from overlap.job.process_set import ProcessSet
from overlap.job.session import current
from overlap.optimizer.adoption import adopt, optimizers_of, refuse_strangers
from overlap.optimizer.arguments import SharedArguments
from overlap.optimizer.distributed import DistributedOptimizer
from overlap.optimizer.sharding import refuse_what_is_lost
from overlap.optimizer.start import agree_on_strategy
from overlap.transport.compression import Compression
from overlap.transport.cuda import streams
from overlap.transport.objects import allgather_object

__all__ = ["WIRES", "begin"]

Groups: TypeAlias = tuple[tuple[int, ...], ...]

#: The compression for each `reduce_dtype`; None is that of gradients. Sums are in fp32, or in fp64 of such gradients.
WIRES = {
    None: Compression.none,
    torch.float32: Compression.none,
    torch.float64: Compression.none,
    torch.bfloat16: Compression.bf16,
    torch.float16: Compression.fp16,
}


def begin(module: Any) -> None:
    """Shard the model around `module`, whose forward pass begins, if there are optimizers that train it. On every rank.

    Raises ``RuntimeError`` for one that is distributed already, and for a parameter that is in two; on every rank where
    ranks have different ones.
    """
    if not torch.is_grad_enabled():
        return
    model = outermost(module)
    if model is not module and unit_of(model).calls:
        return  # that has looked already
    trained = [each for each in model.parameters() if each.requires_grad]
    if not optimizers_of(trained):
        return
    found = _found(list(model.parameters()))
    _refuse_taken(model, found)
    agree_on_strategy("fsdp")
    refuse_what_is_lost(model, "fsdp")
    root = root_of(model)
    root.units = units_in([model])
    _refuse_frozen(model, root.units, {each for optimizer in found for each in _trained(optimizer)})
    for unit in root.units:
        unit.root = root
    refuse_strangers(_sharded)
    process_set, groups, post_forward = _ranks(root.units, [_described(each, model) for each in found])
    adopted: list[DistributedOptimizer] = []
    for each in found:
        arguments = replace(_arguments(root.units, each), process_set=process_set)
        strategy = partial(_strategy, root.units, groups, post_forward, arguments)
        adopted.append(adopt(each, model, strategy, arguments, adopted[0] if adopted else None))
    root.train(adopted)


def _found(parameters: Sequence[torch.Tensor]) -> list[torch.optim.Optimizer]:
    """The optimizers that have `parameters`, also of those that are frozen now, by the first one that each has.

    So their order is the same on all ranks.
    """
    if len(optimizers_of(parameters)) > 1:
        gc.collect()  # one that the script has let go of may be there still, on some ranks
    places = {id(parameter): place for place, parameter in enumerate(parameters)}
    return sorted(
        optimizers_of(parameters),
        key=lambda each: min(places.get(number, len(places)) for number in _trained(each)),
    )


def _refuse_taken(model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise ``RuntimeError`` where a parameter has two optimizers, or a distributed one."""
    if current().registry.having(list(model.parameters())):
        raise RuntimeError(
            f"parameters of {type(model).__name__} belong to a DistributedOptimizer, and fully_shard() works with plain "
            "optimizers: leave out fully_shard(), or do not wrap the optimizer"
        )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    owners: dict[int, torch.optim.Optimizer] = {}
    for optimizer in optimizers:
        for number in _trained(optimizer):
            other = owners.setdefault(number, optimizer)
            if other is not optimizer:
                raise RuntimeError(
                    f"parameter {names.get(number)!r} of {type(model).__name__} is in two optimizers "
                    f"({type(other).__name__}, {type(optimizer).__name__}), and fully_shard() gives each parameter to one: "
                    "let go of the other one, or divide the parameters between them"
                )


def _described(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> str:
    mine = _trained(optimizer)
    first = next((name for name, each in model.named_parameters() if id(each) in mine), "")
    return f"{type(optimizer).__name__} of {len(mine)} parameters from {first!r}"


def _sharded() -> set[int]:
    return taken(sharded=True)


def _strategy(
    units: Sequence[Unit],
    groups: Groups,
    post_forward: int | None,
    arguments: SharedArguments,
    optimizer: torch.optim.Optimizer,
) -> Fsdp:
    numbers = _numbers(optimizer, (unit for unit in units if unit.stays))
    shard_group = groups if len(groups) > 1 else None
    dtype, threshold_mb = _one(units, "param_dtype"), units[0].threshold_mb
    found = automatic(
        optimizer,
        arguments,
        threshold_mb,
        stay=numbers,
        param_dtype=dtype,
        shard_group=shard_group,
        offload=bool(_one([unit for unit in units if any(map(streams.on_device, unit.parameters))], "offload")),
    )
    found.two_level, found.post_forward_ranks = units[0].two_level, post_forward
    found.post_forward = frozenset(_numbers(optimizer, (unit for unit in units if unit.post_forward is not None)))
    return found


def _numbers(optimizer: torch.optim.Optimizer, units: Iterable[Unit]) -> list[int]:
    """The slots of the parameters of `units`."""
    wanted = {id(each) for unit in units for each in unit.parameters}
    return [number for number, each in enumerate(_trained(optimizer)) if each in wanted]


def _arguments(units: Sequence[Unit], optimizer: torch.optim.Optimizer) -> SharedArguments:
    trained = _trained(optimizer)
    inner = [[each for each in unit.parameters if id(each) in trained and each.requires_grad] for unit in units[1:]]
    wire = _one(units, "reduce_dtype") or _one(units, "param_dtype")
    return SharedArguments(
        groups=[group for group in inner if group] or None,
        compression=WIRES[wire],
        elementwise=_promise(units, "elementwise"),
        per_parameter=_promise(units, "per_parameter"),
        **units[0].arguments,
    )


def _one(units: Sequence[Unit], name: str) -> Any:
    """The value that all `units` have for `name`."""
    found: set[Any] = {getattr(unit, name) for unit in units if unit.parameters}
    if len(found) > 1:
        raise NotImplementedError(f"{name} differs between modules ({found}): give all of them the same")
    return found.pop() if found else None


def _promise(units: Sequence[Unit], name: str) -> bool | None:
    """What some of `units` were told as `name`, about the optimizer of all of them."""
    found = {getattr(unit, name) for unit in units} - {None}
    if len(found) > 1:
        raise ValueError(f"{name} is True for some modules of a model and False for others, which one optimizer trains")
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


def _ranks(units: Sequence[Unit], optimizers: list[str]) -> tuple[ProcessSet, Groups, int | None]:
    """The ranks of all `units`, the groups of them within which they are sharded, and among how many after forward.

    On every rank of the job. Raises on all of them where some give others than their peers, or have found other
    `optimizers`, as they are described. The last is None on all ranks, or a number on all: 1 where none was given.
    """
    session = current()
    mine = list(dict.fromkeys((unit.groups, unit.by_default_group) for unit in units if unit.parameters))
    sizes = sorted({unit.post_forward for unit in units if unit.parameters and unit.post_forward is not None})
    told = allgather_object(session.control, (mine, optimizers, place(), sizes))
    numbers = {(there.group, there.rank): rank for rank, (_, _, there, _) in enumerate(told) if there is not None}
    groups = []
    for rank, (meshes, _, there, _) in enumerate(told):
        found = list(dict.fromkeys(_in_job(rank, each, there if by else None, numbers) for each, by in meshes))
        if len(found) > 1:
            raise NotImplementedError(
                f"mesh differs between modules: some are sharded over ranks {_listed(found[0])} and some over "
                f"{_listed(found[1])}; give all modules of a model the same"
            )
        groups.append(found[0])
    why = _why_no_sets(groups) or _why_no_peers(groups, [theirs for _, theirs, _, _ in told])
    if why is not None:
        raise ValueError(why)
    mine_after_forward = _after_forward([sizes for *_, sizes in told], session.comm.rank)
    return set_of(list(dict.fromkeys(map(_members, groups)))), groups[session.comm.rank], mine_after_forward


def _after_forward(sizes: Sequence[Sequence[int]], rank: int) -> int | None:
    """Among how many ranks `rank` shards after forward, if modules of each rank were given these `sizes`, by rank (pure).

    None if no rank has any: else all make communicators, though for themselves alone.
    """
    for each in sizes:
        if len(each) > 1:
            raise NotImplementedError(
                f"reshard_after_forward is {each[0]} for some modules of a model and {each[1]} for others: give all of "
                "them one number, or True or False"
            )
    return (sizes[rank] or [1])[0] if any(sizes) else None


def _members(groups: Groups) -> tuple[int, ...]:
    return tuple(sorted(rank for group in groups for rank in group))


def _listed(groups: Groups) -> str:
    return " and ".join(str(list(group)) for group in groups)


def _in_job(rank: int, groups: Groups, there: Place | None, numbers: Mapping[tuple[str, int], int]) -> Groups:
    """The `groups` of ranks of a mesh of `rank`, as the job numbers them (pure).

    If they are of a default group, `rank` is `there` in it, and `numbers` has the ranks of the job by group and rank in it.
    """
    if there is None:
        return groups
    strangers = [each for each in _members(groups) if (there.group, each) not in numbers]
    if strangers:
        raise ValueError(
            f"rank {rank} of the job shards over ranks {_listed(groups)} of its default group of torch.distributed, in "
            f"which it is rank {there.rank}, and rank {strangers[0]} there is not in the job: give a dear.Mesh"
        )
    return tuple(tuple(sorted(numbers[there.group, each] for each in group)) for group in groups)


def _why_no_sets(groups: Sequence[Groups]) -> str | None:
    """What is wrong with the `groups` that ranks give, by rank, where ranks of them do not all give these (pure)."""
    for rank, mine in enumerate(groups):
        members = _members(mine)
        if rank not in members:
            return f"rank {rank} is not among the ranks {_listed(mine)} of the mesh that it gives to fully_shard()"
        for other in members:
            if groups[other] != mine:
                return (
                    f"rank {rank} shards over ranks {_listed(mine)} and rank {other} over {_listed(groups[other])}: all "
                    "ranks of a mesh have to give that mesh to fully_shard()"
                )
    return None


def _why_no_peers(groups: Sequence[Groups], optimizers: Sequence[list[str]]) -> str | None:
    """What is wrong with the `optimizers` that ranks have found, by rank, where those of one group differ (pure)."""
    for rank, mine in enumerate(groups):
        first = _members(mine)[0]
        if optimizers[rank] != optimizers[first]:
            return (
                f"rank {first} trains the model with {', '.join(optimizers[first])}, and rank {rank} with "
                f"{', '.join(optimizers[rank])}: make the same optimizers on every rank before the first training pass"
            )
    return None


def _trained(optimizer: torch.optim.Optimizer) -> dict[int, None]:
    """The ids of its parameters, in the order of their slots."""
    return dict.fromkeys(id(each) for group in optimizer.param_groups for each in group["params"])
