"""MG-WFBP (Shi, Chu and Li, INFOCOM 2019): tensors are merged where the saved start-up costs more than the waiting."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from mgwfbp.schedule import plan_buckets, table
from overlap.bucket import Bucket
from overlap.communicator import Communicator, ReduceOp
from overlap.cost_model import CostModel
from overlap.horovod.compression import NoneCompressor
from overlap.objects import agree
from overlap.observer import Facts
from overlap.optimizer import DistributedOptimizer as Shell
from overlap.partition import TensorSpec
from overlap.session import current
from overlap.startup import collect_slots
from overlap.strategy import Plan, Strategy

__all__ = ["DistributedOptimizer", "MgWfbp"]

log = logging.getLogger("dear")


class MgWfbp(Strategy):
    """One all-reduce per merged group of tensors, under backward, finished in ``step()``.

    `cost` and `seconds` (backward time by tensor; None: as in the first iteration) are the same on every rank.
    """

    name = "mgwfbp"
    sharding = False

    def __init__(
        self,
        cost: CostModel,
        *,
        asc: bool = False,
        merge_below_kb: float = 0,
        seconds: Mapping[int, float] | None = None,
        report: bool = False,
    ) -> None:
        if merge_below_kb < 0:
            raise ValueError(f"merge_below_kb should be at least 0 and is {merge_below_kb}")
        self.cost, self.asc, self.merge_below_kb, self.seconds = cost, asc, merge_below_kb, seconds
        self._report = report

    def plan(self, facts: Facts, specs: Sequence[TensorSpec], shardable: Sequence[bool], world_size: int) -> Plan:
        plan, groups = plan_buckets(
            facts,
            specs,
            world_size,
            self.cost,
            seconds=self.seconds,
            asc=self.asc,
            merge_below=round(self.merge_below_kb * 1024),
        )
        if self._report:
            log.info("%s", table(groups, self.cost))
            self._report = False
        return plan

    def reduce(self, comm: Communicator, bucket: Bucket) -> None:
        bucket.work = comm.all_reduce_async(bucket.outgoing, bucket.incoming, bucket.op, label=bucket.label)

    def gather(self, comm: Communicator, bucket: Bucket) -> None:
        raise AssertionError("no bucket of this strategy holds parameters")


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: torch.nn.Module | Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: Any = NoneCompressor,
    backward_passes_per_step: int = 1,
    op: ReduceOp = ReduceOp.AVG,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    *,
    asc: bool = False,
    merge_below_kb: float = 0,
    layerwise_times: Mapping[str, float] | None = None,
    alpha_beta: tuple[float, float] | None = None,
    **shell: Any,
) -> Shell:
    """Distribute `optimizer` with MG-WFBP's schedule. On every rank, after ``mgwfbp.init()``.

    Args:
        optimizer: any ``torch.optim.Optimizer``.
        named_parameters: the module, or pairs of name and parameter, or None.
        compression, backward_passes_per_step, op, gradient_predivide_factor, num_groups, groups: as in Horovod; see
            :class:`overlap.optimizer.DistributedOptimizer`.
        asc: merge only where merging delays nothing (ASC-WFBP).
        merge_below_kb: groups of fewer KB (2^10 bytes) are merged with the next tensor in any case.
        layerwise_times: backward seconds by parameter name, as :func:`overlap.profiler.profile_backward` returns them;
            rank 0's count. None: the times of the first iteration.
        alpha_beta: seconds to start an all-reduce, and seconds per byte; rank 0's count. None: measured, once per
            session.
        shell: ``sync_start=True``, of the same class.

    Raises ``ValueError`` for times of parameters that are not the optimizer's, and for times no computer can have.
    """
    session = current()
    given = agree(session.comm, (layerwise_times, alpha_beta))
    seconds = None
    if given[0] is not None:
        if not (named_parameters is None or isinstance(named_parameters, torch.nn.Module)):
            named_parameters = list(named_parameters)
        seconds = _by_index(given[0], optimizer, named_parameters)
    cost = session.link_cost if given[1] is None else CostModel(*given[1])
    report = session.comm.rank == 0
    strategy = MgWfbp(cost, asc=asc, merge_below_kb=merge_below_kb, seconds=seconds, report=report)
    shell |= {
        "compression": compression,
        "backward_passes_per_step": backward_passes_per_step,
        "op": op,
        "gradient_predivide_factor": gradient_predivide_factor,
        "num_groups": num_groups,
        "groups": groups,
    }
    return Shell(optimizer, named_parameters, strategy, **shell)


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
