"""MG-WFBP (Shi, Chu and Li, INFOCOM 2019): merges tensors where a saved start-up costs more than the wait for it."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from mgwfbp.rehearsal import Rehearsal
from mgwfbp.schedule import plan_buckets, reordered, table
from overlap.job.groups import beside, leader
from overlap.job.process_set import ProcessSet, global_process_set
from overlap.job.session import current
from overlap.optimizer.arguments import SharedArguments, refuses_unknown
from overlap.optimizer.dears_arguments import understands_dears_names
from overlap.optimizer.distributed import DistributedOptimizer as Shell
from overlap.optimizer.start import agree_on_strategy, collect_slots
from overlap.optimizer.tuning import tune as start_tuning
from overlap.plan.cost_model import CostModel
from overlap.plan.link_probe import link_cost
from overlap.plan.partition import TensorSpec
from overlap.plan.plan import Facts, Plan
from overlap.plan.strategy import Strategy
from overlap.plan.tuning.options import Tuning
from overlap.plan.tuning.space import Dimension, Setting
from overlap.transport.communicator import ReduceOp
from overlap.transport.compression import NoneCompressor
from overlap.transport.objects import agree, allgather_object

__all__ = ["DistributedOptimizer", "MgWfbp"]

log = logging.getLogger("dear")


class MgWfbp(Strategy):
    """MG-WFBP's strategy: one all-reduce per merged group of tensors, under backward, finished in ``step()``.

    Backward times are those of the first iteration, or, by tensor, `moments` (when gradients are complete) or `seconds`
    (between a gradient and the one before). All arguments but `report` are the same on every rank.
    """

    name = "mgwfbp"

    def __init__(
        self,
        cost: CostModel,
        *,
        asc: bool = False,
        merge_below_kb: float = 0,
        seconds: Mapping[int, float] | None = None,
        moments: Mapping[int, float] | None = None,
        report: bool = False,
    ) -> None:
        if not merge_below_kb >= 0:
            raise ValueError(f"merge_below_kb should be at least 0 and is {merge_below_kb}")
        if asc and merge_below_kb:
            raise ValueError(
                f"merge_below_kb is {merge_below_kb}, but asc=True merges only where that delays nothing; leave one out"
            )
        self.cost, self.asc, self.merge_below_kb, self.seconds = cost, asc, merge_below_kb, seconds
        self.moments = moments
        self.report = report  # log the next plan

    @property
    def space(self) -> tuple[Dimension, ...]:
        return () if self.asc else (Dimension("merge_below_kb", 1, 256 * 1024),)

    @property
    def setting(self) -> dict[str, float]:
        return {} if self.asc else {"merge_below_kb": self.merge_below_kb}

    @property
    def terms(self) -> dict[str, Any]:
        return {"asc": bool(self.asc), **self.setting}

    def at(self, setting: Setting) -> MgWfbp:
        other = copy.copy(self)
        other.merge_below_kb, other.report = setting["merge_below_kb"], False
        return other

    def measured(self, moments: Mapping[int, float], *, report: bool) -> MgWfbp:
        """The same strategy with newly measured times."""
        other = copy.copy(self)
        other.moments, other.seconds, other.report = moments, None, report
        return other

    def plan(self, facts: Facts, specs: Sequence[TensorSpec], shardable: Sequence[bool], world_size: int) -> Plan:
        plan, groups = plan_buckets(
            facts if self.moments is None else reordered(facts, self.moments),
            specs,
            world_size,
            self.cost,
            seconds=self.seconds,
            asc=self.asc,
            merge_below=self.merge_below_kb * 1024,
        )
        if self.report:
            since = "the first gradient" if self.seconds is None else "backward began"
            log.info("%s", table(groups, self.cost, since))
            self.report = False
        return plan


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
    asc: bool = False,
    merge_below_kb: float = 0,
    layerwise_times: Mapping[str, float] | None = None,
    profile_steps: int = 5,
    alpha_beta: tuple[float, float] | None = None,
    tune: bool | Tuning = False,
    elementwise: bool | None = None,
    per_parameter: bool | None = None,
    sync_start: bool = True,
    poison: bool | None = None,
    broadcast_buffers: bool = True,
    check_every: int | None = None,
    on_nonfinite: str = "raise",
) -> Shell:
    """Distribute `optimizer` with MG-WFBP's schedule. On every rank, after ``mgwfbp.init()``.

    Args:
        optimizer: any ``torch.optim.Optimizer``.
        named_parameters: the module, or pairs of name and parameter, or None.
        compression: this, and what follows up to `process_set`: as in Horovod; see
            :class:`overlap.optimizer.arguments.HorovodArguments`.
        asc: merge only where merging delays nothing (ASC-WFBP).
        merge_below_kb: groups of fewer KB (2^10 bytes) on the wire are merged with the next tensor in any case; not with
            `asc`. 0: where the time
            that issuing an all-reduce takes from backward makes that worth while.
        layerwise_times: backward seconds by parameter name, as :func:`mgwfbp.backward_times.profile_backward` returns them;
            those of the first rank of the process set count. None: measured while training goes on.
        profile_steps: without `layerwise_times`, the first plan follows the times of the first iteration; after as many
            more steps as this, and one that is not counted, the final one follows their median. 0: the first plan stays.
        alpha_beta: seconds to start an all-reduce, and seconds per byte; rank 0's count, and issuing takes no time: the
            published rule alone. None: measured, once per session; where a model is on a GPU, by each optimizer.
        tune: True or ``Tuning(...)`` searches the `merge_below_kb` with the shortest steps while training goes on, once
            the backward times are measured. See :class:`overlap.plan.tuning.options.Tuning`.
        elementwise: this, and `per_parameter`, `sync_start`, `poison`, `broadcast_buffers`, `check_every`,
            `on_nonfinite`: see :class:`overlap.optimizer.arguments.SharedArguments`.

    Raises ``ValueError`` for arguments that contradict each other, for times of parameters that are not the optimizer's,
    and for times no computer can have.
    """
    arguments = SharedArguments.of(locals())
    agree_on_strategy("mgwfbp", tune)
    session = current()
    alpha_beta, profile_steps = agree(session.comm, (alpha_beta, profile_steps))
    comm = beside(session, process_set) if profile_steps else session.comm  # also where a set has its times
    lead = leader(process_set, session.comm.rank)
    offered = allgather_object(session.comm, layerwise_times if lead == session.comm.rank else None)
    layerwise_times = offered[lead]
    if profile_steps < 0:
        raise ValueError(f"profile_steps should be at least 0 and is {profile_steps}")
    seconds, problem = None, ""
    if layerwise_times is not None:
        profile_steps = 0
        if not (named_parameters is None or isinstance(named_parameters, torch.nn.Module)):
            named_parameters = list(named_parameters)
        try:
            seconds = _by_index(layerwise_times, optimizer, named_parameters)
        except ValueError as error:
            problem = str(error)
    for told in allgather_object(session.comm, problem):  # the ranks of other sets would wait for this one's
        if told:
            raise ValueError(told)
    strategy = MgWfbp(
        CostModel(0.0, 0.0) if alpha_beta is None else CostModel(*alpha_beta),
        asc=asc,
        merge_below_kb=merge_below_kb,
        seconds=seconds,
        report=session.comm.rank == lead and profile_steps == 0,
    )
    distributed = Shell(optimizer, named_parameters, strategy, arguments)
    if alpha_beta is None:  # now that it is known what moves gradients, and before they are planned, in the first step
        mine = distributed._engine.round.comm
        launched = any(allgather_object(session.comm, mine.streams is not None))  # sets may be on other devices
        strategy.cost = link_cost(mine if launched else session.comm)
    rehearsal = Rehearsal(comm, profile_steps) if profile_steps else None
    if rehearsal is not None:
        rehearsal.attach(distributed)
    start_tuning(distributed, tune, process_set, ready=lambda: rehearsal is None or not rehearsal.under_way)
    return distributed


def _by_index(times: Mapping[str, float], optimizer: torch.optim.Optimizer, model: Any) -> dict[int, float]:
    """Backward seconds by the number that the shell gives to each parameter."""
    module = model if isinstance(model, torch.nn.Module) else None
    slots = collect_slots(optimizer, module, None if module is not None else model)
    known = {slot.name: slot.index for slot in slots}
    strangers = [name for name in times if name not in known]
    if strangers:
        raise ValueError(
            f"layerwise_times names {strangers[0]!r} (and {len(strangers) - 1} more) and the optimizer's parameters are "
            f"named {', '.join(map(repr, list(known)[:3]))}, …; profile the model that is wrapped"
        )
    wrong = {name: value for name, value in times.items() if not 0 <= value < float("inf")}
    if wrong:
        raise ValueError(
            f"layerwise_times should be at least 0 and finite; (name, seconds): {next(iter(wrong.items()))}"
        )
    return {known[name]: value for name, value in times.items()}
