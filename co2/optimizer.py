"""The optimizer of co2: the user's own, stepping locally, and an outer step on what the ranks come to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from co2.equations import OuterRule
from co2.join import JoinRefusal
from co2.lifetime import Ownership, Shutdown
from co2.rounds import Rounds
from co2.schedule import Schedule
from overlap.features.join import joined_ranks_of
from overlap.job.groups import Membership
from overlap.job.process_set import ProcessSet, global_process_set
from overlap.job.session import Session, current
from overlap.optimizer.arguments import SharedArguments, refuses_unknown
from overlap.optimizer.dears_arguments import understands_dears_names
from overlap.optimizer.distributed import DistributedOptimizer as Shell
from overlap.optimizer.start import agree_on_strategy
from overlap.plan.partition import TensorSpec, fuse
from overlap.plan.plan import Facts, Plan
from overlap.plan.strategy import Strategy
from overlap.transport.broadcast import broadcast_tensors
from overlap.transport.communicator import Communicator, ReduceOp
from overlap.transport.compression import NoneCompressor
from overlap.transport.objects import allgather_object

__all__ = ["Co2", "Co2Optimizer", "DistributedOptimizer"]

_FUSION_BYTES = 25 * 2**20


class Co2(Strategy):
    """Gradients within a group: all-reduced as they come, in buckets of 25 MB, finished in ``step()``."""

    name = "co2"

    def __init__(self, schedule: Schedule, rule: OuterRule, nprocs: int | None, broadcast_buffers: bool) -> None:
        self._terms = {
            "outer_frequency": schedule.frequency,
            "outer_lr": rule.lr,
            "outer_momentum": rule.momentum,
            "outer_clip": rule.clip,
            "gap_penalty": rule.gap_penalty,
            "warmup_steps": schedule.warmup,
            "nprocs_per_node": nprocs,
            "broadcast_buffers": bool(broadcast_buffers),
        }

    @property
    def terms(self) -> dict[str, Any]:
        return dict(self._terms)

    def plan(self, facts: Facts, specs: Sequence[TensorSpec], shardable: Sequence[bool], world_size: int) -> Plan:
        used = [(index,) for index in facts.arrivals if index not in facts.idle]
        idle = [(index,) for index in facts.arrivals if index in facts.idle]
        buckets = [
            bucket for units in (used, idle) for bucket in fuse(units, specs, world_size, threshold_bytes=_FUSION_BYTES)
        ]
        return Plan(tuple(buckets), (False,) * len(buckets))


class Co2Optimizer(Shell):
    """What :func:`DistributedOptimizer` returns; see there for the arguments."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: torch.nn.Module | Iterable[tuple[str, torch.nn.Parameter]] | None,
        arguments: SharedArguments,
        schedule: Schedule,
        rule: OuterRule,
        nprocs: int | None,
        broadcast_buffers: bool,
    ) -> None:
        session = current()
        _check_nprocs(nprocs, session.comm.size)
        if arguments.process_set is not global_process_set and arguments.process_set.process_set_id != 0:
            raise ValueError(
                f"co2 averages over all ranks, in groups of nprocs_per_node; process_set={arguments.process_set} is not "
                "supported"
            )
        _refuse_devices(optimizer)
        strategy = Co2(schedule, rule, nprocs, broadcast_buffers)
        groups = partial(_node_groups, nprocs=nprocs)
        arguments = replace(arguments, broadcast_buffers=False)  # they are local until average_parameters()
        super().__init__(optimizer, named_parameters, strategy, arguments, groups_of=groups)
        self._broadcast_buffers = broadcast_buffers
        topic = session.registry.topic_of(self)
        refusal = JoinRefusal(
            joined_ranks_of(session), f"{topic}/outer", range(session.comm.size), self._engine.participants.ranks
        )
        self._rounds = _make_rounds(session, self._everyone, self._engine.slots, schedule, rule, refusal, topic)

    @property
    def local_steps(self) -> int:
        """Steps since the current round began."""
        return self._rounds.in_round

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """A step of the user's optimizer on this group's gradients; every `outer_frequency`-th one ends a round.

        A step that a GradScaler skips counts, too: ranks may skip different ones.
        """
        self._rounds.begin()
        result = self._step(closure)
        self._rounds.stepped()
        return result

    @torch.inference_mode(False)  # what is made here is trained with
    def average_parameters(self) -> None:
        """All ranks' parameters become their mean, to be evaluated or saved; training goes on from it with a new round.

        Exactly: the mean over ranks of the parameters as they are, plus the outer step that is on its way, which they
        have not made yet (it is waited for). Nothing is lost or counted twice. The optimizer's own state stays local.
        Buffers become rank 0's, with `broadcast_buffers`. On every rank, after the same number of steps and not between
        backward and ``step()``; raises ``RuntimeError`` on every rank where some have come to another round.
        """
        self._engine.policy.refuse("average_parameters()")
        if self._engine.round.touched:
            raise RuntimeError("gradients wait for step(): call it, or zero_grad(), before average_parameters()")
        self._rounds.average(current().control)
        if self._broadcast_buffers and self._model is not None:
            broadcast_tensors(self._everyone, list(self._model.buffers()), 0)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters: they take rank 0's values, and take part from the next step on. On every rank."""
        self._rounds.arrive()  # whose channel this uses
        super().add_param_group(param_group)

    @torch.inference_mode(False)
    def state_dict(self) -> dict[str, Any]:
        """Plain torch format; of the user's optimizer, this rank's state. On any subset of ranks, at any time.

        ``["co2"]`` beside it holds the outer state of all ranks, for which it waits until every rank has begun the round.
        """
        state = super().state_dict()
        state["co2"] = self._rounds.collect()
        return state

    @torch.inference_mode(False)
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of any world size, on every rank; its ``["co2"]`` with it, which is the same on all ranks.

        Without that, a first round begins at the next step, with the parameters that the model has then. Where every rank
        saved its own model and optimizer, and loads them, training goes on bit for bit; from rank 0's alone, all go on
        from rank 0's point in the round.
        """
        super().load_state_dict(state_dict)
        self._rounds.load(state_dict.get("co2"))


def _check_nprocs(nprocs: int | None, size: int) -> None:
    """Raise ``ValueError`` unless `size` ranks are blocks of `nprocs`."""
    if nprocs is not None and (not isinstance(nprocs, int) or nprocs < 1 or size % nprocs):
        raise ValueError(f"nprocs_per_node should divide the number of ranks, {size}, and is {nprocs!r}")


def _node_groups(session: Session, nprocs: int | None) -> Membership:
    """This rank's group, of ranks n to n + `nprocs` - 1. None: of one host, or each rank alone where there is one host.

    On every rank of the job.
    """
    rank, size = session.comm.rank, session.comm.size
    colors = allgather_object(session.control, session.cross_rank if nprocs is None else rank // nprocs)
    if nprocs is None and len(set(colors)) == 1:
        colors = list(range(size))
    members = tuple(other for other, color in enumerate(colors) if color == colors[rank])
    if len(members) == size:
        everyone, comm, calls = session.channels.lease(3)
    else:
        everyone, comm, calls = *session.channels.lease(1), *session.channels.lease(2, colors)
    lane = (comm,)
    return Membership(lane, lane, calls, members, everyone)


def _refuse_devices(optimizer: torch.optim.Optimizer) -> None:
    groups = optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else []
    for param in (param for group in groups for param in group["params"]):
        if param.device.type != "cpu":
            raise ValueError(
                "co2 sends parameters from a thread of its own, which knows nothing of the streams that they are "
                f"computed on: they should be on the CPU, and one is on {param.device}"
            )


def _make_rounds(
    session: Session,
    comm: Communicator,
    slots: list[Any],
    schedule: Schedule,
    rule: OuterRule,
    refusal: JoinRefusal,
    topic: str,
) -> Rounds:
    rounds = Rounds(comm, slots, schedule, rule, refusal, session.peer_queries)
    joined_ranks_of(session).enroll(refusal)
    session.registry.add_owner(topic, Ownership(rounds, session.control))
    shutdown = session.services.setdefault("co2", Shutdown(session.control))
    assert isinstance(shutdown, Shutdown), "nobody else has that name"
    shutdown.add(topic, rounds)
    return rounds


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
    outer_frequency: int = 12,
    outer_lr: float = 1.0,
    outer_momentum: float = 0.2,
    outer_clip: float | None = 1.0,
    gap_penalty: bool | float = True,
    warmup_steps: int = 0,
    nprocs_per_node: int | None = None,
    broadcast_buffers: bool = True,
    elementwise: bool | None = None,
    per_parameter: bool | None = None,
    sync_start: bool = True,
    poison: bool | None = None,
) -> Co2Optimizer:
    """Local steps of `optimizer`, and CO2's outer step on their averages. On every rank, after ``co2.init()``.

    This is not synchronous SGD: between averages ranks hold different parameters, and results depend on their number.
    Call ``average_parameters()`` before parameters are evaluated or saved, also at the end: ``shutdown()`` waits for the
    round that is on its way, and leaves parameters as they are.

    Args:
        optimizer: any ``torch.optim.Optimizer``; its state stays on each rank, and is kept from round to round.
        named_parameters: the module, or pairs of name and parameter, or None.
        compression: this, and what follows up to `sparse_as_dense`: as in
            Horovod, for gradients, which are averaged within `nprocs_per_node` only; see
            :class:`overlap.optimizer.arguments.HorovodArguments`. Parameters travel in their own type, 16 bits as float32.
        process_set: only the global one, as averages are over all ranks. Raises ``ValueError`` for others.
        outer_frequency: local steps in a round (the paper's tau). As many as hide one reduce-scatter and one all-gather
            of all parameters; the paper tries 1 to 48.
        outer_lr, outer_momentum, outer_clip: alpha, beta and phi (None: no clipping) of `co2.equations`.
        gap_penalty: True divides what an average proposes by the measured staleness gap, 1 to 2; a number divides by
            that; False by nothing.
        warmup_steps: the first steps are each followed by an average that is waited for. With SGD, that is synchronous
            training.
        nprocs_per_node: ranks in a block that averages gradients in every step, so that its parameters are the same. None:
            those of one host, or each rank by itself where all are on one.
        broadcast_buffers: ``average_parameters()`` gives every rank rank 0's buffers. They are local otherwise, and of
            parameters given without a module nobody knows any.
        elementwise: this, and `per_parameter`, `sync_start`, `poison`: see
            :class:`overlap.optimizer.arguments.SharedArguments`.
    """
    arguments = SharedArguments.of(locals())
    agree_on_strategy("co2")
    return Co2Optimizer(
        optimizer,
        named_parameters,
        arguments,
        Schedule(outer_frequency, warmup_steps),
        OuterRule(outer_lr, outer_momentum, outer_clip, gap_penalty),
        nprocs_per_node,
        broadcast_buffers,
    )
