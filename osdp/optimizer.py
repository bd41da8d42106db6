"""``DistributedOptimizer``, and ``plan()``, which does not train."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch

from osdp.activations import Blocks
from osdp.memory_plan import GB, KEEP, pinned_by, rule_of
from osdp.strategy import Osdp
from osdp.watching import Watching
from overlap.job.groups import ShardGroups, beside
from overlap.job.memory.counted import available_bytes, resident_bytes
from overlap.job.process_set import ProcessSet, global_process_set
from overlap.job.session import current
from overlap.optimizer.arguments import SharedArguments, refuses_unknown
from overlap.optimizer.dears_arguments import understands_dears_names
from overlap.optimizer.distributed import DistributedOptimizer as Shell
from overlap.optimizer.sharding import module_of, needs_owners, refuse_offload_of_owned, sizes
from overlap.optimizer.start import agree_on_strategy
from overlap.plan.link_probe import link_cost
from overlap.transport.communicator import ReduceOp
from overlap.transport.compression import NoneCompressor
from overlap.transport.objects import allgather_object

__all__ = ["DistributedOptimizer", "limit_of", "watched"]

_SPARE = 0.9  # of the memory that is free, which the limit "auto" takes


@understands_dears_names
@refuses_unknown()
def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: torch.nn.Module | Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: Any = NoneCompressor,
    backward_passes_per_step: int = 1,
    op: ReduceOp = ReduceOp.AVG,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    memory_limit_gb: float | Literal["auto"] = "auto",
    fsdp_plan: Mapping[str, str] | Literal["model"] | None = None,
    recompute: Sequence[torch.nn.Module] | Callable[[torch.nn.Module], bool] | bool | None = None,
    threshold_mb: float | Literal["auto"] | None = "auto",
    whole_mb: float | Literal["auto"] = "auto",
    gather_dtype: torch.dtype | None = None,
    offload: Literal["cpu"] | None = None,
    shard_group: ShardGroups = None,
    residency: Literal["host"] | None = None,
    elementwise: bool | None = None,
    per_parameter: bool | None = None,
    sync_start: bool = True,
    poison: bool | None = None,
    broadcast_buffers: bool = True,
    check_every: int | None = None,
    on_nonfinite: str = "raise",
) -> Shell:
    """Distribute `optimizer` and shard the model as ``fsdp`` does, and keep as much of it whole as the memory limit allows.

    The first steps free all parameters after each use; the memory that they take is measured. Then those buckets stay whole
    that make the step shortest, as simulated from measured times. Results are those of ``fsdp``.

    Args:
        optimizer: any ``torch.optim.Optimizer``; see ``fsdp.DistributedOptimizer``.
        named_parameters: the module. Raises ``TypeError`` for anything else.
        compression: this, and what follows up to `process_set`: as in Horovod; see
            :class:`overlap.optimizer.arguments.HorovodArguments`.
        memory_limit_gb: the GB (2^30 bytes) that a rank's process may have in memory while it trains, all it takes counted:
            parameters, gradients, optimizer state, activations, and what was there before; of a model on a GPU, that its
            tensors may have there. More than that in all of the
            first steps, while everything is freed, raises ``MemoryError`` on every rank. ``"auto"``: what the process has
            now and 90 % of what is free, shared with the other ranks of the host; the least that any rank finds.
        fsdp_plan: ``"keep_full_weight"`` or ``"free_full_weight"`` for patterns of module names, as in the `_fsdp_plan` of
            transformers' models: these modules are kept from forward to backward, or freed after each use, and the others
            are chosen. ``"model"``: what the model has in its `_fsdp_plan`.
        recompute: blocks of the model that backward may compute again, so that what they save for it is not kept
            (activation checkpointing): modules, or a function that is given each module and says whether it is one. The
            plan takes as many of them as make the step shortest. None: what the model declares, as transformers' layers do.
            False: none. Raises ``ValueError`` for blocks whose forward changes buffers, as BatchNorm's does, that are
            compiled, or that the script has checkpointed.
        threshold_mb: this, `whole_mb`, `gather_dtype`, `shard_group` and `offload`: as for ``fsdp.DistributedOptimizer``.
            Of small buckets, more of the limit is used. With a `shard_group`, all groups have one plan.
        residency: ``"host"``: the plan may also have buckets lie once in the memory of each host, until the step, so that
            each of its R ranks takes an R-th of them. On several hosts, operations then go in two levels. Raises
            ``ValueError`` for hosts with different numbers of ranks, or with one each, for parameters on a GPU, optimizers
            that need whole parameters, and with `gather_dtype`, `offload`, `shard_group` or a `process_set`.
        elementwise: this, and `per_parameter`, `sync_start`, `poison`, `broadcast_buffers`, `check_every`,
            `on_nonfinite`: see :class:`overlap.optimizer.arguments.SharedArguments`.

    On every rank, after ``osdp.init()``.
    """
    arguments = SharedArguments.of(locals())
    agree_on_strategy("osdp")
    model = module_of(named_parameters, "osdp")
    rules = _rules(model, fsdp_plan)
    there = (each.device for each in model.parameters() if each.is_cuda)
    limit = limit_of(memory_limit_gb, next(there, torch.device("cpu")))
    owned = needs_owners(optimizer, arguments)
    if owned and offload is not None:
        refuse_offload_of_owned(optimizer)
    strategy = Osdp(
        *sizes(optimizer, threshold_mb, whole_mb),
        limit,
        gather_dtype,
        rules,
        blocks=Blocks(model, recompute),
        shard_group=shard_group,
        owned=owned,
        offload=offload == "cpu",
        residency=residency,
    )
    if rules is not None and not (arguments.groups or arguments.num_groups):
        arguments = SharedArguments(**{**vars(arguments), "groups": _kept_alone(model, optimizer, rules)})
    return watched(Shell(optimizer, model, strategy, arguments), process_set)


def limit_of(memory_limit_gb: float | str, place: torch.device) -> int:
    """The limit in bytes, of the memory of the device at `place`, or of the host. On every rank; the same on all."""
    if memory_limit_gb != "auto":
        if not float(memory_limit_gb) > 0:
            raise ValueError(f"memory_limit_gb should be above 0, or 'auto', and is {memory_limit_gb}")
        return int(float(memory_limit_gb) * GB)
    session = current()
    sharing = session.local_size if place.type == "cpu" else 1  # a GPU is taken for this rank's alone
    mine = resident_bytes(place=place) + int(_SPARE * available_bytes(place) / sharing)
    return min(allgather_object(session.control, mine))


def watched(distributed: Shell, process_set: ProcessSet = global_process_set) -> Shell:
    """`distributed`, whose strategy is :class:`osdp.strategy.Osdp`, and which looks at what its steps take from now on."""
    strategy = distributed.strategy
    assert isinstance(strategy, Osdp)
    assert strategy.memory_limit is not None
    comm = beside(current(), process_set)
    rules, model, news = strategy.fsdp_plan, distributed._model, distributed._replanning
    lane, cost = distributed._engine.unsharder.lane, link_cost(comm)
    gathers = cost if lane.size == comm.size else link_cost(lane)  # within a group
    watching = Watching(comm, distributed._engine, model, strategy, news, strategy.memory_limit, (cost, gathers), rules)
    watching.attach(distributed)
    return distributed


def _rules(model: torch.nn.Module, fsdp_plan: Mapping[str, str] | str | None) -> dict[str, str] | None:
    if fsdp_plan is None:
        return None
    if fsdp_plan == "model":
        found = getattr(model, "_fsdp_plan", None)
        if not found:
            raise ValueError(
                f"fsdp_plan='model' takes the plan of a transformers model, and {type(model).__name__} has no _fsdp_plan"
            )
        fsdp_plan = found
    assert isinstance(fsdp_plan, Mapping), "no other kind is taken"
    rules = {name: style for pattern, style in fsdp_plan.items() for name in _names_of(pattern)}
    pinned_by(rules, [(name.rpartition(".")[0],) for name, _ in model.named_parameters()])
    return rules


def _names_of(pattern: Any) -> Sequence[str]:
    """transformers may have several modules in one rule."""
    return pattern if isinstance(pattern, tuple) else (pattern,)


def _kept_alone(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, rules: Mapping[str, str]
) -> list[list[torch.Tensor]] | None:
    """The parameters of each module that is to be kept, so that they share no bucket with others."""
    trained = {id(each) for group in optimizer.param_groups for each in group["params"]}
    groups = []
    for name, module in model.named_modules():
        mine = [each for each in module.parameters(recurse=False) if id(each) in trained and each.requires_grad]
        trained.difference_update(map(id, mine))
        rule = rule_of(rules, name)
        if mine and rule is not None and rules[rule] == KEEP:
            groups.append(mine)
    return groups or None
