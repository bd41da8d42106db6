"""What works behind one distributed optimizer, put together from the user's arguments."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from overlap.aliases import check_memory
from overlap.arguments import HorovodArguments, check_passes
from overlap.attendance import Attendance
from overlap.averages import Averages
from overlap.communicator import Communicator
from overlap.conversion import Conversion
from overlap.cuda_wiring import fit_out
from overlap.elementwise import decides_by_loss, is_elementwise, is_per_parameter
from overlap.engine import Engine
from overlap.exchange import Exchange
from overlap.full_state import FullState, exporter
from overlap.grouping import parse_groups
from overlap.horovod.process_set import global_process_set
from overlap.master import check_gather_dtype
from overlap.membership import Membership, membership
from overlap.session import Session
from overlap.skips import Skips
from overlap.startup import collect_slots, synchronize_start
from overlap.state_share import StateShare
from overlap.stepper import Stepper
from overlap.strategy import Strategy
from overlap.synchronizations import Synchronizations
from overlap.tenure import Tenure
from overlap.terms import agree_on_terms, terms_of
from overlap.updates import Updates, feasible

__all__ = ["Assembly", "build"]

log = logging.getLogger("dear")


@dataclass(frozen=True)
class Assembly:
    """The parts. `model` is None where the user gave parameters."""

    comm: Communicator
    everyone: Communicator
    model: torch.nn.Module | None
    engine: Engine
    averages: Averages
    stepper: Stepper
    full_state: FullState


def build(
    session: Session,
    shell: torch.optim.Optimizer,
    optimizer: torch.optim.Optimizer,
    named_parameters: torch.nn.Module | Iterable[tuple[str, torch.nn.Parameter]] | None,
    strategy: Strategy,
    arguments: HorovodArguments,
    *,
    elementwise: bool | None,
    per_parameter: bool | None,
    sync_start: bool,
    poison: bool | None,
    groups_of: Callable[[Session], Membership] | None = None,
) -> Assembly:
    """What `shell` consists of; see :class:`overlap.optimizer.DistributedOptimizer` for the arguments. On every rank."""
    check_passes(arguments.backward_passes_per_step)
    elementwise = is_elementwise(optimizer) if elementwise is None else elementwise
    if per_parameter is not None and strategy.updates is not Updates.OWNED:
        raise ValueError(
            f"per_parameter={per_parameter} is about strategies that give whole parameters to ranks (oss), and strategy "
            f"{strategy.name!r} does not; elementwise=True promises that an optimizer may be applied to slices"
        )
    if per_parameter is None:
        per_parameter = elementwise or is_per_parameter(optimizer)
    by_loss = decides_by_loss(optimizer) and not per_parameter
    updates = feasible(strategy.updates, optimizer, elementwise, arguments.compression, per_parameter=per_parameter)
    if strategy.updates is Updates.OWNED and updates is Updates.WHOLE and session.comm.rank == 0:
        log.warning(
            "strategy %r keeps all optimizer state on every rank: %s",
            strategy.name,
            _why_whole(optimizer, per_parameter),
        )
    model = named_parameters if isinstance(named_parameters, torch.nn.Module) else None
    named = None if isinstance(named_parameters, torch.nn.Module) else named_parameters
    slots = collect_slots(optimizer, model, named)
    check_memory(slots, updates, session.comm.rank)
    session.registry.take_over([slot.param for slot in slots])
    groups = parse_groups(arguments.num_groups, arguments.groups, slots)
    terms = terms_of(strategy, arguments, updates, groups, by_loss=by_loss, sync_start=sync_start)
    everybody = arguments.process_set is global_process_set
    if everybody:  # before channels are leased, whose number depends on them
        agree_on_terms(session.control, terms)
    if groups_of is not None:
        hosts = groups_of(session)
    else:
        hosts = membership(session, arguments.process_set, sharding=updates.in_shards, lanes=strategy.lanes)
    if not everybody:
        agree_on_terms(hosts.comm, terms)
    members = fit_out(session, hosts, slots, strategy)
    comm = members.comm
    exchange = Exchange(arguments.compression, arguments.op, arguments.gradient_predivide_factor, comm.size)
    if sync_start:
        synchronize_start(members.everyone, optimizer, model, slots)
    pairs = ((slot.name, slot.param) for slot in slots if slot.param.requires_grad)
    check_gather_dtype(strategy.gather_dtype, pairs, optimizer, sharding=updates.in_shards)
    attendance = Attendance(comm, members.ranks, session.roll)
    engine = Engine(
        members.reductions,
        members.gathers,
        optimizer,
        model,
        slots,
        strategy,
        exchange,
        attendance,
        groups=groups,
        sparse_as_dense=arguments.sparse_as_dense,
        passes=arguments.backward_passes_per_step,
        updates=updates,
        poison=session.poison if poison is None else poison,
    )
    topic = attendance.topic = session.registry.register(shell, Tenure(engine))
    session.channels.hold((*hosts.reductions, *hosts.gathers, hosts.everyone), topic)
    engine.arrangement.conversion = Conversion(session.comm.rank, attendance, session.mailroom)
    engine.skips = Skips(session.comm.rank, attendance, session.mailroom, session.comm.abort)
    engine.synchronizations = Synchronizations(session.comm.rank, attendance, session.mailroom)
    others = [rank for rank in members.ranks if rank != session.comm.rank]
    share = StateShare(others, session.mailroom, topic, exporter(engine))
    engine.arrangement.changing = share.updating
    if engine.eager is not None:
        engine.eager.locked = share.replacing
    averages = Averages(engine)
    stepper = Stepper(engine, averages, optimizer, share, by_loss=by_loss)
    return Assembly(comm, members.everyone, model, engine, averages, stepper, FullState(engine, optimizer, share))


def _why_whole(optimizer: torch.optim.Optimizer, per_parameter: bool) -> str:
    if per_parameter:
        return "a compression of your own needs whole gradients; Compression.fp16 and .bf16 do not"
    return (
        f"{type(optimizer).__name__} is not known to update each parameter from its own gradient and state alone "
        "(per_parameter=True promises that it does)"
    )
