"""Puts together, from the user's arguments, the parts that work behind one distributed optimizer.

How long an optimizer has its parameters: until another one takes them, or all ranks have dropped it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from overlap.core.averages import Averages
from overlap.core.bucket import Slot
from overlap.core.buckets.arrangement import Arrangement
from overlap.core.buckets.heap import keep_apart
from overlap.core.buckets.planner import Planner
from overlap.core.closing import Closing
from overlap.core.engine import Engine
from overlap.core.feature import Feature, Policy
from overlap.core.gathering import Transit
from overlap.core.once import Once
from overlap.core.round import Round
from overlap.core.shards import ShardUpdate
from overlap.core.step import Stepper
from overlap.core.unsharding import Enlisted, SamePasses, Unsharder
from overlap.core.wire import Exchange
from overlap.features import torch_clipping
from overlap.features.buffers import BroadcastBuffers
from overlap.features.by_loss import step_by_loss
from overlap.features.deferred import DeferredUpdates
from overlap.features.early import EarlyUpdates
from overlap.features.forward_writes import ForwardWrites
from overlap.features.gradient_check import GradientCheck
from overlap.features.hyper_parameters import HyperParameters
from overlap.features.join import joined_ranks_of
from overlap.features.join_rounds import JoinRounds
from overlap.features.nonfinite import NonfiniteCheck, SkippedSteps
from overlap.features.renormed import RenormedRows, announced
from overlap.features.replanning import Replanning
from overlap.features.replicas import EarlyReplicaCheck, ReplicaCheck, final_parameters, named_parameters_of
from overlap.features.rounded_parameters import RoundedParameters
from overlap.features.same_data import SameData
from overlap.features.sparse import DenseGradients, SparseGradients
from overlap.health.explained import in_words
from overlap.job.devices import fit_out
from overlap.job.groups import Membership, membership
from overlap.job.memory.host_memory import HostMemory
from overlap.job.process_set import global_process_set
from overlap.job.session import Session
from overlap.optimizer.arguments import SharedArguments, check_passes, feasible, parse_groups
from overlap.optimizer.memory_check import check_memory, check_room
from overlap.optimizer.once_per_host import frozen_memory, host_of
from overlap.optimizer.param_groups import Wrapped
from overlap.optimizer.start import (
    agree_on_terms,
    collect_slots,
    postpone_values,
    refuse_graphed,
    refuse_on_host,
    refuse_other_sharders,
    refuse_other_wrappers,
    synchronize_start,
    tell_of_a_lone_trainer,
    terms_of,
    units_of,
)
from overlap.plan.groups import Groups
from overlap.plan.plan import Updates
from overlap.plan.strategy import PlannedStrategy, Strategy
from overlap.state.deferred_init import is_deferred
from overlap.state.elementwise import decides_by_loss, divisible, is_per_parameter, takes_sparse_alone
from overlap.state.full_state import FullState, exporter
from overlap.state.rows import Rows
from overlap.state.shard_state import ShardState
from overlap.state.share import StateShare
from overlap.transport.communicator import Communicator

__all__ = ["Assembly", "Ownership", "build", "features_of"]


log = logging.getLogger("dear")


@dataclass(frozen=True)
class Assembly:
    """The parts of one distributed optimizer. `model` is None where the user gave parameters."""

    comm: Communicator
    everyone: Communicator
    model: torch.nn.Module | None
    wrapped: Wrapped
    engine: Engine
    rounds: JoinRounds
    averages: Averages
    stepper: Stepper
    full_state: FullState
    replanning: Replanning | None


def build(
    session: Session,
    shell: torch.optim.Optimizer,
    optimizer: torch.optim.Optimizer,
    named_parameters: torch.nn.Module | Iterable[tuple[str, torch.nn.Parameter]] | None,
    strategy: Strategy,
    arguments: SharedArguments,
    *,
    groups_of: Callable[[Session], Membership] | None = None,
    passes: Unsharder | None = None,
) -> Assembly:
    """Put together the parts behind `shell`; see :class:`.DistributedOptimizer` for the arguments. On every rank."""
    refuse_other_sharders(optimizer)
    check_passes(arguments.backward_passes_per_step)
    torch_clipping.install()
    arguments = _with_possible_gradients(session, optimizer, arguments)
    updates, by_loss = _updates(session, optimizer, strategy, arguments)
    model = named_parameters if isinstance(named_parameters, torch.nn.Module) else None
    named = None if isinstance(named_parameters, torch.nn.Module) else named_parameters
    slots = collect_slots(optimizer, model, named)
    refuse_other_wrappers(model, slots)
    refuse_graphed(model, slots, strategy.name, updates)
    tell_of_a_lone_trainer(model, session.comm)
    check_memory(slots, updates, session.comm.rank)
    if strategy.on_host or strategy.some_on_host:
        refuse_on_host(model, slots)
    groups = parse_groups(arguments.num_groups, arguments.groups, slots)
    deferred = sum(is_deferred(slot.param) for slot in slots)
    terms = terms_of(strategy, arguments, updates, groups, by_loss=by_loss, deferred=deferred)
    everybody = arguments.process_set is global_process_set
    if everybody:  # before channels are leased, whose number depends on them
        agree_on_terms(session.control, terms)
    check_room(session.control, slots, strategy, updates)
    shares = not strategy.learns and any(len(ranks) > 1 for ranks in session.hosts)
    frozen = frozen_memory(session, model) if model is not None and shares and arguments.sync_start else []
    late = postpone_values(model, slots, strategy, updates, shared=arguments.sync_start, frozen=frozen)
    session.registry.take_over([slot.param for slot in slots])
    if groups_of is not None:
        hosts = groups_of(session)
    else:
        hosts = membership(
            session,
            arguments.process_set,
            sharding=updates.in_shards,
            lanes=strategy.lanes,
            shard_group=strategy.shard_group,
            two_level=strategy.two_level,
            on_host=strategy.on_host,
            some_on_host=strategy.some_on_host,
            post_forward_ranks=strategy.post_forward_ranks,
        )
    if not everybody:
        agree_on_terms(hosts.comm, terms)
    named = [(slot.name, slot.param) for slot in slots]
    members = fit_out(session, hosts, named, _why_not_on_a_gpu(strategy), _EAGER if updates is Updates.EAGER else "")
    for attach in late:
        attach(members.everyone)
    host = host_of(session, members.ranks) if shares else None
    if arguments.sync_start:
        synchronize_start(members.everyone, optimizer, model, slots, host=host, frozen=frozen)
    poisoned = session.poison if arguments.poison is None else arguments.poison
    assembly = _assemble(
        session,
        optimizer,
        model,
        slots,
        strategy,
        arguments,
        members,
        updates,
        groups,
        by_loss=by_loss,
        poison=poisoned,
        unsharder=Unsharder(model, poison=poisoned and members.comm.size > 1) if passes is None else passes,
    )
    inside = () if hosts.groups is None else (hosts.comm, hosts.shards)
    inside = (*inside, *(each for each in (hosts.host, hosts.lines, hosts.post_forward) if each is not None))
    channels = (*hosts.reductions, *hosts.gathers, hosts.calls, hosts.everyone, *inside)
    owner = Ownership(assembly.engine, assembly.wrapped, assembly.full_state, {channel.name for channel in channels})
    topic = session.registry.register(shell, owner)
    assembly.rounds.enroll(topic)
    session.channels.hold(channels, topic)
    assembly.full_state.share.serve(topic, exporter(assembly.engine))
    return assembly


def _updates(
    session: Session,
    optimizer: torch.optim.Optimizer,
    strategy: Strategy,
    arguments: SharedArguments,
) -> tuple[Updates, bool]:
    """How updates run, and whether the optimizer may decide by the loss. What is lost thereby is said on rank 0."""
    if arguments.per_parameter and strategy.updates is not Updates.OWNED:
        raise ValueError(
            "per_parameter=True is about strategies that give whole parameters to ranks (oss, fsdp), and strategy "
            f"{strategy.name!r} does not; elementwise=True promises that an optimizer may be applied to slices"
        )
    elementwise, per_parameter = divisible(optimizer, arguments.elementwise, arguments.per_parameter)
    updates = feasible(strategy.updates, optimizer, elementwise, arguments.compression, per_parameter=per_parameter)
    if updates is Updates.EAGER and arguments.on_nonfinite == "skip":
        raise ValueError(
            "on_nonfinite='skip' leaves out a step when all gradients are known, and eager=True updates before that: use "
            "'raise' or 'ignore', or eager=False"
        )
    if (strategy.on_host or strategy.some_on_host) and not updates.in_shards:
        why = _why_whole(strategy, optimizer, elementwise)
        raise ValueError(f"residency='host' has each rank update its share, and every rank updates all here: {why}")
    if strategy.updates.in_shards and updates is Updates.WHOLE and session.comm.rank == 0:
        may = per_parameter if strategy.updates is Updates.OWNED else elementwise
        why = _why_whole(strategy, optimizer, may)
        log.warning("strategy %r keeps all optimizer state on every rank: %s", strategy.name, why)
    return updates, decides_by_loss(optimizer) and not per_parameter


def _with_possible_gradients(
    session: Session, optimizer: torch.optim.Optimizer, arguments: SharedArguments
) -> SharedArguments:
    """Gradients stay sparse for an optimizer that takes no others. Made sparse again, they would have lost which rows
    were used: one process updates those, also where the gradient is zero."""
    if not (arguments.sparse_as_dense and takes_sparse_alone(optimizer)):
        return arguments
    if session.comm.rank == 0:
        log.warning(
            "%s takes sparse gradients alone, so sparse_as_dense=True makes none of its gradients dense: their rows are "
            "gathered. Leave it out",
            type(optimizer).__name__,
        )
    return replace(arguments, sparse_as_dense=False)


def _assemble(
    session: Session,
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module | None,
    slots: list[Slot],
    strategy: Strategy,
    arguments: SharedArguments,
    members: Membership,
    updates: Updates,
    groups: Groups,
    *,
    by_loss: bool,
    poison: bool,
    unsharder: Unsharder,
) -> Assembly:
    """The parts, from the lowest up: each is given those below it. Communicates nothing but values that are made now."""
    comm, used = members.comm, strategy.param_dtype is not None
    dtype = strategy.param_dtype if used else strategy.gather_dtype
    exchange = Exchange(arguments.compression, arguments.op, arguments.gradient_predivide_factor, comm.size)
    rounded = None if dtype is None else RoundedParameters(dtype, optimizer, used=used)
    if rounded is not None:
        rounded.check([slot for slot in slots if slot.param.requires_grad], sharding=updates.in_shards)
    plans = strategy.looks or (isinstance(strategy, PlannedStrategy) and bool(strategy.planned))
    replanning = Replanning() if plans and comm.size > 1 else None
    transit = Transit(members.gathers, poison=poison)
    rounds = JoinRounds(comm, members.ranks, joined_ranks_of(session), slots, shared_order=not strategy.ordered)
    room = None if strategy.whole_mb is None else int(strategy.whole_mb * 2**20)
    host = None if members.host is None else HostMemory(members.host)
    unsharder.enlist(rounds, comm, members.gathers, room, members.post_forward, members.lines, host)
    every = session.settings.check_every if arguments.check_every is None else arguments.check_every
    compares = EarlyReplicaCheck if updates is Updates.EAGER else ReplicaCheck
    alike = named_parameters_of(model, slots, partial(_slots_of, session))
    renormed = RenormedRows(members.calls, alike, early=updates is Updates.EAGER) if comm.size > 1 else None
    replicas = None
    if every and renormed is not None:
        final = final_parameters(alike, transit, partial(_apart, renormed, model))
        replicas = compares(every, final, rounds)
    writes = None
    if renormed is not None and updates is not Updates.EAGER:  # which makes replicas differ until step()
        writes = ForwardWrites(members.calls, members.ranks, alike, transit, partial(_apart, renormed, model))
    features = (
        Enlisted(unsharder, rounds),
        *features_of(
            members,
            slots,
            model,
            optimizer,
            exchange,
            rounded,
            replicas,
            (renormed, writes),
            sparse_as_dense=arguments.sparse_as_dense,
            broadcast_buffers=arguments.broadcast_buffers,
            replanning=replanning,
            check=arguments.on_nonfinite == "raise",
        ),
    )
    if not strategy.learns and comm.size > 1:
        features = (*features, SamePasses(unsharder))
    others = [rank for rank in members.holders if rank != session.comm.rank]
    share = StateShare(others, session.peer_queries)
    states, rows = ShardState(members.shards, optimizer, share), Rows(share)
    once = None if is_per_parameter(optimizer) else Once(optimizer)
    planner = Planner(
        comm,
        slots,
        strategy,
        groups,
        ShardUpdate(optimizer, once, whole=updates is Updates.OWNED) if updates.in_shards else None,
        states,
        exchange,
        lanes=len(members.reductions),
        make_master=None if rounded is None else rounded.master,
        sharers=members.shards,
        host=host,
    )
    round = Round(
        planner,
        members.reductions,
        exchange,
        transit,
        unsharder,
        rounds,
        features,
        passes=arguments.backward_passes_per_step,
        hold_last=updates.in_shards,  # [Note: nobody overtakes a step]
        ordered=strategy.ordered,
        deferred=updates is Updates.DEFERRED,
    )
    policy = Policy()
    if updates is Updates.EAGER:
        policy = EarlyUpdates(comm, optimizer, round, transit, share)
    elif updates is Updates.DEFERRED:
        policy = DeferredUpdates(optimizer, round, transit, known=once is None, poison=poison)
    arrangement = Arrangement(comm, planner, round, transit, unsharder, states, policy, features)
    closing = Closing(members.calls, round, arrangement, unsharder, rounds, policy, features)
    gated = updates is not Updates.WHOLE
    engine = Engine(
        model, planner, transit, unsharder, round, arrangement, closing, rounds, policy, features, gated=gated
    )
    if writes is not None:
        writes.bind(engine)
    wrapped = Wrapped(optimizer, engine, gated=gated)
    averages = Averages(engine, comm, members.shards)
    skips = SkippedSteps(members.calls, slots).skips if arguments.on_nonfinite == "skip" else None
    stepper = Stepper(engine, averages, optimizer, states, step_by_loss if by_loss else None, skips)
    rows.bind(planner, policy)
    full_state = FullState(engine, optimizer, states, rows)
    if not strategy.learns:
        keep_apart(True)  # values that are made now, and go to buckets
        try:
            arrangement.begin(units_of(model, slots))
            for slot in slots:
                slot.make_values()  # of what is in no shard
        finally:
            keep_apart(False)
        full_state.parameters.attach(engine.modules, slots)
    everyone = members.everyone
    return Assembly(comm, everyone, model, wrapped, engine, rounds, averages, stepper, full_state, replanning)


def features_of(
    members: Membership,
    slots: list[Slot],
    model: torch.nn.Module | None,
    optimizer: torch.optim.Optimizer,
    exchange: Exchange,
    rounded: RoundedParameters | None,
    replicas: ReplicaCheck | None,
    forward: Iterable[Feature | None],
    *,
    sparse_as_dense: bool,
    broadcast_buffers: bool,
    replanning: Replanning | None,
    check: bool,
) -> tuple[Feature, ...]:
    """All features that may take part in an optimizer's steps, in the order in which they are told of each moment."""
    comm = members.comm
    dense = (DenseGradients(),) if sparse_as_dense else ()  # as they come; those that a script puts there stay sparse
    sparse = SparseGradients(comm, slots, exchange, None if sparse_as_dense else model)
    rounding = () if rounded is None else (rounded,)
    buffers: tuple[Feature, ...] = ()
    if broadcast_buffers and model is not None and comm.size > 1:
        buffers = (BroadcastBuffers(model, members.calls, comm),)
    planning = () if replanning is None else (replanning,)
    writes = tuple(feature for feature in forward if feature is not None)
    alike: tuple[Feature, ...] = (HyperParameters(optimizer),) if comm.size > 1 else ()
    alike = alike if replicas is None else (*alike, replicas)
    finite = (NonfiniteCheck(),) if check else ()
    return (SameData(comm), *dense, sparse, GradientCheck(), *rounding, *buffers, *writes, *planning, *alike, *finite)


def _slots_of(session: Session) -> list[Slot]:
    """The slots of all optimizers of `session`."""
    return [slot for optimizer in session.registry.optimizers for slot in optimizer._engine.slots]


def _apart(renormed: RenormedRows, model: torch.nn.Module | None) -> set[str]:
    """Names of parameters whose replicas may differ between forward and ``step()``."""
    return renormed.names | announced(model)


def _why_not_on_a_gpu(strategy: Strategy) -> str:
    if strategy.ordered:
        return ""
    return (
        f"strategy {strategy.name!r} sends from a thread of its own, which knows nothing of the streams that "
        "parameters on a GPU are computed on; use dear, wfbp, mgwfbp or oss there"
    )


_EAGER = (
    "eager=True gathers parameters as soon as a rank has time, between reductions, and NCCL needs one order of both on all "
    "ranks: leave eager=True out, or set DEAR_CUDA_TRANSPORT=staged"
)


def _why_whole(strategy: Strategy, optimizer: torch.optim.Optimizer, divisible: bool) -> str:
    if divisible:
        return "a compression of your own needs whole gradients; Compression.fp16 and .bf16 do not"
    if strategy.updates is Updates.OWNED:
        what, promise = "parameter from its own gradient and state alone", "per_parameter"
    else:
        what, promise = "element from its own gradient and state alone", "elementwise"
    return f"{type(optimizer).__name__} is not known to update each {what} ({promise}=True promises that it does)"


class Ownership:
    """The engine's hold on its parameters; see :class:`overlap.job.registry.Owner`, which this is."""

    def __init__(self, engine: Engine, wrapped: Wrapped, full_state: FullState, channels: Collection[str]) -> None:
        self._engine, self._wrapped, self._full_state, self.channels = engine, wrapped, full_state, channels
        self._gone = False

    @property
    def unfinished(self) -> bool:
        return self._engine.round.touched or self._engine.round.dropped

    def has(self, parameters: Sequence[torch.Tensor]) -> bool:
        engine = self._engine
        mine = {id(slot.param) for slot in engine.slots}
        return not self._gone and any(id(parameter) in mine for parameter in parameters)

    def meaning(self, label: str) -> str:
        number = re.match(r"b(\d+)\b", label)
        found = [bucket for bucket in list(self._engine.order) if number and bucket.index == int(number[1])]
        return in_words([slot.name for slot in found[0].slots], found[0].round) if found else ""

    def hand_over(self, unfinished: bool) -> None:
        self._gone = True
        self._engine.closing.ended = (
            f"parameters of this optimizer, {self._engine.slots[0].name!r} or others, went to a DistributedOptimizer that "
            "was made later, here or on another rank; step that one, and give every parameter to one optimizer"
        )
        if unfinished:
            self._engine.round.flush()
        self.retire()

    def retire(self) -> None:
        try:
            self._engine.retire()
        finally:
            self._wrapped.remove()
            self._full_state.remove()
