"""Checks, before the first step, that all ranks have the same parameters, and gives them rank 0's values.

Arguments of the wrapper are compared first, before anything else is communicated.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch.nn.parameter import is_lazy

from overlap.core.bucket import Slot, line
from overlap.core.cuda_graphs import graphed_module, refuse_graphed_module
from overlap.core.other_wrappers import other_sharder, other_wrapper
from overlap.features.renormed import announced
from overlap.job.axes import axes_of
from overlap.job.session import current
from overlap.optimizer.arguments import SharedArguments
from overlap.optimizer.once_per_host import Memory, alike, share_from_rank_0
from overlap.plan.groups import Groups
from overlap.plan.plan import Updates
from overlap.plan.strategy import Strategy
from overlap.plan.tuning.options import Tuning
from overlap.state.deferred_init import give_values, is_deferred, materialize, postpone, tensors_of
from overlap.state.optimizer_state import broadcast_optimizer_state
from overlap.transport.broadcast import broadcast_tensors
from overlap.transport.communicator import Communicator
from overlap.transport.cuda import streams
from overlap.transport.objects import allgather_object, compare
from overlap.transport.operation import broadcast

__all__ = [
    "agree_on_strategy",
    "agree_on_terms",
    "collect_slots",
    "postpone_values",
    "refuse_graphed",
    "refuse_other_sharders",
    "refuse_other_wrappers",
    "synchronize_start",
    "tell_of_a_lone_trainer",
    "terms_of",
    "units_of",
]

log = logging.getLogger("dear")


def collect_slots(
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module | None,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None,
    known: Sequence[Slot] = (),
) -> list[Slot]:
    """One slot per distinct parameter of the optimizer, in the order of its groups; `known` ones are kept.

    Raises ``ValueError`` for duplicate names, for pairs that are none, when names are given but not for all, and for a
    model that has none of the parameters.
    """
    names: dict[int, str] = {}
    if model is not None:
        names = {id(param): name for name, param in model.named_parameters()}
        mine = [param for group in optimizer.param_groups for param in group["params"]]
        if mine and names and not any(id(param) in names for param in mine):
            raise ValueError(
                f"none of the optimizer's {len(mine)} parameters is one of the {len(names)} of the {type(model).__name__}: "
                "give the model whose parameters the optimizer holds (was it converted or copied in between?)"
            )
    elif named_parameters is not None:
        pairs = list(named_parameters)
        if any(not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str) for pair in pairs):
            raise ValueError("named_parameters should hold pairs (name, parameter), as model.named_parameters() does")
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"parameter name {name!r} appears twice in named_parameters; names should be unique")
            seen.add(name)
        names = {id(param): name for name, param in pairs}
    by_param = {id(slot.param): slot for slot in known}
    slots: list[Slot] = list(known)
    for group_index, group in enumerate(optimizer.param_groups):
        for position, param in enumerate(group["params"]):
            if id(param) in by_param:
                continue
            given = names.get(id(param))
            if given is None and named_parameters is not None:
                raise ValueError(
                    f"parameter {position} of group {group_index}, shape {tuple(param.shape)}, has no name: "
                    f"named_parameters holds {len(names)} parameters and should hold all of the optimizer's"
                )
            _refuse_lazy(given or f"{position} of group {group_index}", param)
            slot = Slot(len(slots), given or f"group{group_index}.{position}", param, group_index)
            by_param[id(param)] = slot
            slots.append(slot)
    for name, buffer in () if model is None else model.named_buffers():
        _refuse_lazy(name, buffer)
    if not slots:
        raise ValueError("the optimizer has no parameters")
    return slots


def units_of(model: torch.nn.Module | None, slots: Sequence[Slot]) -> list[tuple[int, ...]]:
    """The slots of each module of `model`, in the order of its modules, each once; others come last, each by itself."""
    left = {id(slot.param): slot.index for slot in slots}
    found = []
    for module in () if model is None else model.modules():
        mine = [left.pop(id(param)) for param in dict.values(module._parameters) if id(param) in left]
        if mine:
            found.append(tuple(mine))
    return [*found, *((index,) for index in left.values())]


def refuse_other_sharders(optimizer: torch.optim.Optimizer) -> None:
    """Raise ``TypeError`` where `optimizer` splits parameters between ranks by itself."""
    found = other_sharder(optimizer)
    if found is not None:
        raise TypeError(found)


def refuse_other_wrappers(model: torch.nn.Module | None, slots: Sequence[Slot]) -> None:
    """Raise ``TypeError`` where another wrapper splits the batch, or averages gradients, of the same parameters."""
    found = other_wrapper(model, slots[0].param)
    if found is not None:
        raise TypeError(found)


def refuse_on_host(model: torch.nn.Module | None, slots: Sequence[Slot]) -> None:
    """Raise ``ValueError`` for parameters that cannot lie in a memory that the ranks of a host share."""
    elsewhere = next((slot for slot in slots if slot.param.device.type not in ("cpu", "meta")), None)
    if elsewhere is not None:
        raise ValueError(
            f"residency='host' is for parameters on the CPU, and {elsewhere.name!r} is on {elsewhere.param.device}: leave "
            "it out"
        )
    shortened = sorted(announced(model))
    if shortened:
        raise ValueError(
            f"forward shortens rows of {shortened[0]!r} (max_norm), and with residency='host' several ranks would in one "
            "memory: leave one of them out"
        )


def refuse_graphed(model: torch.nn.Module | None, slots: Sequence[Slot], strategy: str, updates: Updates) -> None:
    """Raise ``ValueError`` for CUDA graphs of the model where parameters move, or are not final when ``step()`` returns."""
    there = [slot.param for slot in slots if streams.on_device(slot.param)]
    found = None if updates is Updates.WHOLE or not there else graphed_module(model, there)
    if found is not None:
        raise ValueError(refuse_graphed_module(found, strategy))


def tell_of_a_lone_trainer(model: torch.nn.Module | None, comm: Communicator) -> None:
    """Warn, on rank 0, where Lightning's Trainer runs `model` and was not told of the job's ranks."""
    trainer = getattr(model, "_trainer", None)
    known = getattr(trainer, "world_size", comm.size)
    if known != comm.size and comm.rank == 0:
        log.warning(
            "the Trainer of this module knows of %s process(es), and the job has %d: each trains on all data, logs for "
            "itself and writes every checkpoint. Import dear.integrations.lightning and give the Trainer "
            "strategy='dear', devices=dear.local_size(), num_nodes=dear.cross_size(); it then wraps optimizers by itself",
            known,
            comm.size,
        )


def _signature(optimizer: torch.optim.Optimizer, slots: Sequence[Slot]) -> list[str]:
    first = f"optimizer {type(optimizer).__name__} with {len(optimizer.param_groups)} parameter group(s)"
    return [first, *(f"{line(slot)}, group {slot.group}" for slot in slots)]


def _refuse_lazy(name: str, tensor: torch.Tensor) -> None:
    if is_lazy(tensor):
        raise ValueError(f"{name!r} belongs to a lazy module and has no shape yet; run one forward before wrapping")


def postpone_values(
    model: torch.nn.Module | None,
    slots: Sequence[Slot],
    strategy: Strategy,
    updates: Updates,
    *,
    shared: bool,
    frozen: Sequence[Memory] = (),
) -> list[Callable[[Communicator], None]]:
    """Leave parameters without memory that ``deferred_init()`` has made, where each rank is to keep its share of them.

    All others get their values, but for those in `frozen`. Returns what gives these slots theirs by a communicator, once
    there is one: rank 0's, if they are `shared`.
    """
    waiting = [slot for slot in slots if is_deferred(slot.param)]
    late = [slot for slot in waiting if slot.param.requires_grad] if updates.in_shards and not strategy.learns else []
    left = {id(tensor) for memory in frozen for tensor in memory.tensors}
    for slot in waiting:
        if slot not in late and id(slot.param) not in left:
            materialize(slot.param)
    memory = torch.empty(
        max((slot.param.nbytes for slot in late), default=0), dtype=torch.uint8
    )  # of all, and untouched

    def postponed(slot: Slot) -> Callable[[Communicator], None]:
        shape, dtype = slot.param.shape, slot.param.dtype
        stand_in = memory[: slot.param.nbytes].view(dtype)[: slot.param.numel()].view(shape)
        values = postpone(slot.param, stand_in, repr(slot.name))

        def attach(comm: Communicator) -> None:
            def fill(home: torch.Tensor) -> None:
                if not shared or comm.rank == 0:
                    home.copy_(values())
                if shared and comm.size > 1:
                    comm.run(broadcast(home.view(-1), 0, label=f"values of {slot.name}"))

            slot.filling = fill

        return attach

    found = [postponed(slot) for slot in late]
    if model is not None:
        give_values(named for named in tensors_of(model) if id(named[1]) not in left)
    return found


def synchronize_start(
    comm: Communicator,
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module | None,
    slots: Sequence[Slot],
    *,
    state: bool = True,
    host: Communicator | None = None,
    frozen: Sequence[Memory] = (),
) -> None:
    """Compare signatures, then take rank 0's parameters, buffers and optimizer state. On every rank of `comm`.

    `frozen` ones are once in the memory of each host afterwards, whose ranks of `comm` `host` connects. Where some
    parameters are parts along an axis of a mesh, the others are those of its first rank. On every rank of it then.
    """
    for axis in axes_of(slot.param for slot in slots):
        others = [slot.param for slot in slots if axis not in axes_of([slot.param]) and slot.filling is None]
        broadcast_tensors(axis.comm, others, 0)
    if comm.size == 1:
        _keep(frozen)
        return
    compare("model and optimizer", allgather_object(comm, _signature(optimizer, slots)))
    tensors: dict[int, torch.Tensor] = {id(slot.param): slot.param for slot in slots}
    if model is not None:
        tensors.update((id(value), value) for value in (*model.parameters(), *model.buffers()))
    for slot in slots:
        if slot.filling is not None:
            del tensors[id(slot.param)]
    if host is not None:
        missing, there = alike(comm, frozen)
        share_from_rank_0(comm, host, missing)
        for memory in (*missing, *there):
            for tensor in memory.tensors:
                tensors.pop(id(tensor), None)
        _keep(frozen)
    broadcast_tensors(comm, list(tensors.values()), 0)
    if state:
        broadcast_optimizer_state(comm, optimizer, 0)


def _keep(frozen: Iterable[Memory]) -> None:
    """Give those that have no values yet memory of their own."""
    for memory in frozen:
        give_values(zip(memory.names, memory.tensors, strict=True))


def agree_on_strategy(name: str, tune: bool | Tuning = False) -> None:
    """Check that all ranks use the same strategy; its package calls this before anything of its own.

    Args:
        name: the strategy's.
        tune: whether and how it is tuned; a path in it is rank 0's own.

    On every rank of the job, whatever its process set. Raises ``SignatureMismatch`` on every rank where two differ, and
    ``RuntimeError`` before ``init()``.
    """
    options = replace(tune, path=None) if isinstance(tune, Tuning) else tune
    agree_on_terms(current().control, [f"strategy={name}", f"tune={options!r}"])


def terms_of(
    strategy: Strategy,
    arguments: SharedArguments,
    updates: Updates,
    groups: Groups,
    *,
    by_loss: bool,
    deferred: int,
) -> list[str]:
    """A line for each argument that decides what is communicated (pure). Objects are called by their types' names.

    `deferred` parameters have no values yet.
    """
    values = {
        "strategy": strategy.name,
        **strategy.terms,
        "updates": updates.name.lower(),
        "closures": "by loss" if by_loss else "once",
        "compression": getattr(arguments.compression, "__qualname__", type(arguments.compression).__qualname__),
        "backward_passes_per_step": arguments.backward_passes_per_step,
        "op": getattr(arguments.op, "name", type(arguments.op).__qualname__),
        "gradient_predivide_factor": float(arguments.gradient_predivide_factor),
        "groups": groups,
        "sparse_as_dense": bool(arguments.sparse_as_dense),
        "sync_start": bool(arguments.sync_start),
        "broadcast_buffers": bool(arguments.broadcast_buffers),
        "check_every": arguments.check_every,
        "on_nonfinite": arguments.on_nonfinite,
        "parameters from deferred_init()": deferred,
    }
    return [f"{name}={value}" for name, value in values.items()]


def agree_on_terms(comm: Communicator, lines: list[str]) -> None:
    """Raise ``SignatureMismatch`` on every rank unless all bring the same lines. On every rank of `comm`."""
    if comm.size > 1:
        compare("arguments of DistributedOptimizer", allgather_object(comm, lines))
