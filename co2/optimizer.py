"""The optimizer of co2: the user's own makes local steps, and an outer step follows from what all ranks come to."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch

from co2.acco.rounds import check as check_for_acco
from co2.equations import Acco, OuterRule
from co2.join import Following
from co2.lifetime import Ownership, Shutdown
from co2.pace import ENOUGH, explained
from co2.recovery.inheritance import inherit
from co2.rounds import Rounds
from co2.rounds_of_rules import rounds_of, schedule_of
from co2.rules import outer_rule, refuse_comparisons
from co2.schedule import Schedule
from overlap.core.bucket import Slot
from overlap.features.join import joined_ranks_of
from overlap.job.groups import Membership
from overlap.job.process_set import ProcessSet, global_process_set
from overlap.job.session import Session, current
from overlap.optimizer.arguments import SharedArguments, refuses_unknown
from overlap.optimizer.dears_arguments import understands_dears_names
from overlap.optimizer.distributed import DistributedOptimizer as Shell
from overlap.optimizer.start import agree_on_strategy
from overlap.plan.partition import TensorSpec, fuse
from overlap.plan.plan import Facts, Plan, replicated
from overlap.plan.strategy import Strategy
from overlap.transport.broadcast import broadcast_tensors
from overlap.transport.communicator import ReduceOp
from overlap.transport.compression import NoneCompressor
from overlap.transport.objects import allgather_object

__all__ = ["Co2", "Co2Optimizer", "DistributedOptimizer"]

log = logging.getLogger("dear")

_FUSION_BYTES = 25 * 2**20
_RULES_OPTIONS = (
    *("outer_lr", "outer_momentum", "outer_clip", "gap_penalty"),
    *("fragments", "overlap_steps", "bits", "mixing", "top_k"),
)


class Co2(Strategy):
    """The strategy for gradients within a group: all-reduced as they come, in 25 MB buckets, finished in ``step()``."""

    name = "co2"

    def __init__(self, schedule: Schedule, rule: OuterRule, nprocs: int | None, broadcast_buffers: bool) -> None:
        self._terms = {
            "outer": rule.name,
            "outer_frequency": schedule.frequency,
            **rule.options,
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
        return replicated(buckets)


class Co2Optimizer(Shell):
    """What :func:`DistributedOptimizer` returns; see there for the arguments."""

    _follows_group = True  # a rank out of data, in its steps

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
        nprocs = _where_ranks_are_lost(nprocs, session)
        _check_nprocs(nprocs, session.comm.size)
        if arguments.process_set is not global_process_set and arguments.process_set.process_set_id != 0:
            raise ValueError(
                f"co2 averages over all ranks, in groups of nprocs_per_node; process_set={arguments.process_set} is not "
                "supported: leave it out, or use another strategy"
            )
        _check_inner_lr(optimizer, rule)
        strategy = Co2(schedule, rule, nprocs, broadcast_buffers)
        groups = partial(_node_groups, nprocs=nprocs)
        arguments = replace(arguments, broadcast_buffers=False)  # they are local until average_parameters()
        super().__init__(optimizer, named_parameters, strategy, arguments, groups_of=groups)
        self._broadcast_buffers = broadcast_buffers
        if isinstance(rule, Acco):
            check_for_acco(optimizer, self._engine.slots, arguments.elementwise)
        topic = session.registry.topic_of(self)
        ranks = self._engine.participants.ranks
        group = ranks if self._follows_group else (session.comm.rank,)
        following = Following(joined_ranks_of(session), session.control, f"{topic}/outer", group, optimizer)
        self.rounds: Rounds = rounds_of(
            rule,
            schedule,
            len(ranks) / session.comm.size,
            optimizer,
            self._everyone,
            self._engine.slots,
            following,
            session.peer_queries,
            partial(_rates, optimizer, self._engine.slots),
        )
        if self.rounds.local_update is not None:
            self._stepper.updates_by(self.rounds.local_update)
        _enroll(session, self.rounds, topic)
        inherit(session, self.rounds)

    @property
    def local_steps(self) -> int:
        """Steps since the current round began, or since a fragment was sent."""
        return self.rounds.in_round

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """A step of the user's optimizer on this group's gradients; every `outer_frequency`-th one ends a round.

        A step that a GradScaler skips counts, too: ranks may skip different ones.
        """
        result = self.local_step(closure)
        self.end_local_step()
        return result

    def local_step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The first half of :meth:`step`: a step of the user's optimizer on this group's gradients. On every rank of it."""
        self.rounds.begin()
        return self._step(closure)

    def end_local_step(self) -> None:
        """The second half of :meth:`step`, which may end a round.

        On every rank, also where a rank of another group stepped nothing.
        """
        self.rounds.stepped()

    @torch.inference_mode(False)  # what is made here is trained with
    def average_parameters(self) -> None:
        """Replace all ranks' parameters by their mean, to evaluate or save it; a new round begins from there.

        Exactly: the mean over ranks of the parameters as they are, plus the outer step that is on its way, which they
        have not made yet (it is waited for). Nothing is lost or counted twice. The optimizer's own state stays local.
        With ``"acco"``, where parameters are the same on all ranks, the update is made that gradients so far lead to.
        With ``"streaming-diloco"`` and ``"sparseloco"`` a fragment on its way is applied first, and then the mean is taken;
        what bytes have left out until then is in nobody's parameters, and is sent with later turns.
        Buffers become rank 0's, with `broadcast_buffers`. On every rank, after the same number of steps and not between
        backward and ``step()``; raises ``RuntimeError`` on every rank where gradients wait on one, or some have joined, or
        come to another round.
        """
        self.rounds.average(current().control, waiting=self._engine.round.touched)
        if self._broadcast_buffers and self._model is not None:
            broadcast_tensors(self._everyone, list(self._model.buffers()), 0)

    def explain(self) -> str:
        """Whether a round hides the exchange of parameters, as this rank has measured both in its last rounds; where there
        are `overlap_steps`, whether they hide that of a fragment.

        On any rank. Raises ``RuntimeError`` before three rounds have arrived, and under an outer rule that waits.
        """
        rounds = self.rounds
        if rounds.waits:
            raise RuntimeError(
                f"there is nothing to explain: with outer={rounds.rule.name!r} every round waits for its average"
            )
        if rounds.pace.rounds < ENOUGH:
            raise RuntimeError(
                f"there is nothing to explain yet: of {ENOUGH} rounds, {rounds.pace.rounds} are measured"
            )
        steps, option = rounds.schedule.hiding
        pace, nbytes, most = rounds.pace, rounds.exchanged_bytes, rounds.schedule.most
        by, size = rounds.rule.exchange, self._everyone.size
        return explained(size, steps, pace.step, pace.exchange, nbytes, option, by, most)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters: they take rank 0's values, and take part from the next step on. On every rank."""
        self.rounds.following.call("add_param_group()", 0)
        self.rounds.arrive()  # whose channel this uses
        super().add_param_group(param_group)

    @torch.inference_mode(False)
    def state_dict(self) -> dict[str, Any]:
        """Plain torch format; of the user's optimizer, this rank's state. On any subset of ranks, at any time.

        ``["co2"]`` beside it holds the outer state of all ranks, for which it waits until every rank has begun the round;
        with ``outer="eager"`` this rank's own, and with ``"streaming-diloco"`` and ``"sparseloco"`` its own remainder of
        what has travelled; with ``"acco"`` its own gradients of the round. Of the user's optimizer, ``"acco"`` has the
        state of all ranks, in the type of exact parameters.
        """
        state = super().state_dict()
        state["co2"] = section = self.outer_state_dict()
        state["state"] |= section.pop("state", {})  # where ranks have shards of it
        return state

    @torch.inference_mode(False)
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of any world size, on every rank; its ``["co2"]`` with it, which is the same on all ranks (with
        ``outer="eager"`` and those two as its own, or rank 0's for all). Raises ``ValueError`` for that of
        another outer rule, or of other fragments.

        Without that, a first round begins at the next step, with the parameters that the model has then. Where every rank
        saved its own model and optimizer, and loads them, training goes on bit for bit; from rank 0's alone, all go on
        from rank 0's point in the round.
        """
        self.rounds.following.refuse("load_state_dict()")
        super().load_state_dict(state_dict)
        self.rounds.load(state_dict.get("co2"), state_dict["state"])

    @torch.inference_mode(False)
    def outer_state_dict(self) -> dict[str, Any]:
        """The outer state alone: ``state_dict()["co2"]``."""
        return self.rounds.collect()

    @torch.inference_mode(False)
    def load_outer_state_dict(self, section: dict[str, Any] | None) -> None:
        """Load what :meth:`outer_state_dict` gave, or None; see :meth:`load_state_dict`."""
        self.rounds.following.refuse("load_outer_state_dict()")
        self.rounds.load(section)


def _where_ranks_are_lost(nprocs: int | None, session: Session) -> int | None:
    """Of ranks of which some were lost since the beginning, blocks that fit; one line where they are smaller."""
    if not isinstance(nprocs, int) or session.roster is None or session.roster.number == 1:
        return nprocs
    fits = math.gcd(nprocs, session.comm.size)
    if fits != nprocs and session.comm.rank == 0:
        log.warning("co2: nprocs_per_node is %d, not %d, with %d ranks", fits, nprocs, session.comm.size)
    return fits


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


def _check_inner_lr(optimizer: torch.optim.Optimizer, rule: OuterRule) -> None:
    groups = optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else []
    if rule.needs_inner_lr and any("lr" not in group for group in groups):
        raise ValueError(
            f"outer={rule.name!r} divides by the learning rate, and a parameter group of the {type(optimizer).__name__} "
            "has no 'lr': use another optimizer, or another outer rule"
        )


def _rates(optimizer: torch.optim.Optimizer, slots: Sequence[Slot]) -> dict[int, float]:
    """Learning rates as they are now, by slot."""
    rates = {id(param): float(group["lr"]) for group in optimizer.param_groups for param in group["params"]}
    return {slot.index: rates[id(slot.param)] for slot in slots}


def _enroll(session: Session, rounds: Rounds, topic: str) -> None:
    joined_ranks_of(session).enroll(rounds.following)
    session.registry.add_owner(topic, Ownership(rounds, session.control))
    shutdown = session.services.setdefault("co2", Shutdown(session.control))
    assert isinstance(shutdown, Shutdown), "nobody else has that name"
    shutdown.add(topic, rounds)


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
    outer: str = "co2",
    outer_frequency: int | Literal["auto"] = "auto",
    outer_lr: float | Literal["auto"] = "auto",
    outer_momentum: float | Literal["auto"] = "auto",
    outer_clip: float | Literal["auto"] | None = "auto",
    gap_penalty: bool | float | Literal["auto"] = "auto",
    fragments: int | Literal["auto"] = "auto",
    overlap_steps: int | Literal["auto"] = "auto",
    bits: int | Literal["auto"] | None = "auto",
    mixing: float | Literal["auto"] = "auto",
    top_k: int | Literal["auto"] = "auto",
    warmup_steps: int = 0,
    nprocs_per_node: int | None = None,
    broadcast_buffers: bool = True,
    check_every: int | None = None,
    on_nonfinite: str = "raise",
    elementwise: bool | None = None,
    per_parameter: bool | None = None,
    sync_start: bool = True,
    poison: bool | None = None,
) -> Co2Optimizer:
    """Local steps of `optimizer`, and an outer step on averages, CO2's or another. On every rank, after ``co2.init()``.

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
        outer: the rule by which averages count, of `co2.equations`, which has the sources. Nobody waits with ``"co2"``,
            whose averages count a round late, and with ``"eager"`` (DiLoCo, where a rank's own part counts at once and that
            of others a round late). At the end of a round all ranks wait for each other with ``"localsgd"`` (plain
            averaging), ``"slowmo"`` (slow momentum) and ``"diloco"`` (Nesterov's momentum). ``"streaming-diloco"`` is
            DiLoCo by fragments of the model in turn, each on its way under some of the steps that follow. With
            ``"sparseloco"`` the largest elements travel, and all ranks wait, unless `overlap_steps` says otherwise. With
            ``"acco"`` gradients travel, each ``step()`` adds its own to those of the round, and two rounds, each half a
            batch, make one step of `optimizer`, on shards: ranks hold the same parameters at all times. `optimizer` has to
            update element by element.
        outer_frequency: local steps in a round (CO2's tau, DiLoCo's H), in which each fragment is sent once. With
            ``"co2"``, ``"eager"`` and ``"acco"``, as many as hide one reduce-scatter and one all-gather of all parameters.
            CO2's paper tries 1 to 48, DiLoCo's 50 to 2,000, SparseLoCo's 15 to 250, that of Streaming DiLoCo has 100.
            ``"auto"``: 12, and 1 with ``"acco"``.
        outer_lr, outer_momentum, outer_clip: alpha, beta and phi (None: no clipping) of the rule. ``"auto"``: 1, 0.2 and 1
            with ``"co2"``; 1 and 0.5 with ``"slowmo"``; 0.7 and 0.9 with ``"diloco"``; 0.4 and 0.9 with ``"eager"`` and
            ``"streaming-diloco"``; alpha is 1 with ``"sparseloco"``. An option that the rule does not know raises
            ``ValueError``.
        gap_penalty: of ``"co2"``. True, which is ``"auto"``, divides what an average proposes by the measured staleness
            gap, 1 to 2; a number divides by that; False by nothing.
        fragments: this, and the next three, of ``"streaming-diloco"`` and ``"sparseloco"``. How many fragments there are,
            at most `outer_frequency`. They are of whole layers, as names tell; parameters given without names are a layer
            each. ``"auto"``: of 3 layers each, as long as `overlap_steps` fit between two; 1 with
            ``"sparseloco"``.
        overlap_steps: tau, the steps between sending a fragment and applying what came of it; at most as many as there are
            between two fragments. 0 waits. ``"auto"``: 1, and 0 with ``"sparseloco"``.
        bits: of an element that travels, 8 or 4, with a scale per 128 elements, or 2 with ``"sparseloco"``; None: in full
            precision. ``"auto"``: 4 and 2. What is left out is kept and sent with a later turn.
        mixing: how much of a rank's own values stays where a fragment is applied; at least 0, below 1. The other part of
            what it has learned in `overlap_steps` is dropped. ``"auto"``: 0.5, and 0 where `overlap_steps` is 0.
        top_k: of ``"sparseloco"``, how many of 4,096 elements travel, 1 to 4096. ``"auto"``: 64.
        warmup_steps: the first steps are each followed by an average that is waited for. With SGD, that is synchronous
            training.
        nprocs_per_node: ranks in a block that averages gradients in every step, so that its parameters are the same. None:
            those of one host, or each rank by itself where all are on one.
        broadcast_buffers: ``average_parameters()`` gives every rank rank 0's buffers. They are local otherwise, and of
            parameters given without a module nobody knows any.
        check_every: 0 or None: replicas differ between averages; ``check_replicas(model)`` after ``average_parameters()``.
        elementwise: this, and `per_parameter`, `sync_start`, `poison`, `on_nonfinite`: see :class:`.SharedArguments`.
    """
    given = dict(locals())
    arguments = SharedArguments.of(given)
    agree_on_strategy("co2")
    refuse_comparisons(check_every)
    rule = outer_rule(outer, {word: given[word] for word in _RULES_OPTIONS})
    return Co2Optimizer(
        optimizer,
        named_parameters,
        arguments,
        schedule_of(rule, rule.frequency if outer_frequency == "auto" else outer_frequency, warmup_steps),
        rule,
        nprocs_per_node,
        broadcast_buffers,
    )
