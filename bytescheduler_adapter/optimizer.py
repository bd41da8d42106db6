"""ByteScheduler (Peng et al., SOSP 2019): partitions, priorities and credit; each layer updated when it is needed."""

from __future__ import annotations

import copy
from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Any, Literal

import torch

from bytescheduler_adapter.dispatcher import Part
from bytescheduler_adapter.dispatchers import Dispatchers, Lease
from bytescheduler_adapter.schedule import partitions, plan_buckets
from overlap.core.bucket import Bucket
from overlap.core.wire import DecoupledCollectives
from overlap.job.process_set import ProcessSet, global_process_set
from overlap.job.session import current
from overlap.optimizer.arguments import SharedArguments, refuses_unknown
from overlap.optimizer.dears_arguments import understands_dears_names
from overlap.optimizer.distributed import DistributedOptimizer as Shell
from overlap.optimizer.planning import plan_by_itself
from overlap.optimizer.start import agree_on_strategy
from overlap.optimizer.tuning import tune as start_tuning
from overlap.plan.partition import TensorSpec
from overlap.plan.plan import Facts, Plan, Updates
from overlap.plan.simulation.events import Run
from overlap.plan.simulation.methods import PARTITIONS_MB
from overlap.plan.simulation.network import Medium
from overlap.plan.simulation.schedules import by_priority
from overlap.plan.simulation.workload import Bucket as PlannedBucket
from overlap.plan.simulation.workload import Workload
from overlap.plan.strategy import Collectives, PlannedStrategy
from overlap.plan.tuning.options import Tuning
from overlap.plan.tuning.space import Dimension, Setting
from overlap.transport.communicator import Communicator, ReduceOp
from overlap.transport.compression import NoneCompressor
from overlap.transport.objects import agree

__all__ = ["ByteScheduler", "DistributedOptimizer"]

_SERVICE = "bytescheduler"
_NO_LIMIT = 2**62  # in place of an infinity: partitions and credit are counted in whole bytes
_FIRST = {"partition_mb": 1.0, "credit_mb": 2.0}  # before anything is planned


class ByteScheduler(PlannedStrategy):
    """ByteScheduler's strategy: a bucket per layer, all-reduced in partitions that more urgent layers overtake.

    Reductions go on after ``step()``; a layer is updated when the next forward, or anybody else, needs it.
    """

    name = "bytescheduler_adapter"
    updates = Updates.DEFERRED
    ordered = False

    def __init__(self, partition_mb: float, credit_mb: float, auto: frozenset[str] = frozenset()) -> None:
        if not partition_mb > 0:
            raise ValueError(f"partition_mb should be above 0 and is {partition_mb}")
        if not credit_mb > 0:
            raise ValueError(f"credit_mb should be above 0 and is {credit_mb}")
        self.partition_mb, self.credit_mb = partition_mb, credit_mb
        self.auto = auto  # what a planner may choose: "partition_mb", "credit_mb"
        self.lease: Lease | None = None  # before the first reduction; all settings of one optimizer share it

    @property
    def planned(self) -> dict[str, float]:
        return {name: value for name, value in self.setting.items() if name in self.auto}

    @property
    def candidates(self) -> Sequence[ByteScheduler]:
        return [self._within({"partition_mb": part, "credit_mb": credit}) for part, credit in PARTITIONS_MB]

    @property
    def neighbours(self) -> Sequence[ByteScheduler]:
        return [self._within({name: value * by}) for name, value in self.planned.items() for by in (0.5, 2.0)]

    def _within(self, setting: Setting) -> ByteScheduler:
        """With as much of `setting` as may be planned, within the bounds of a search."""
        bounds = {dimension.name: dimension for dimension in self.space}
        chosen = {
            name: min(max(value, bounds[name].low), bounds[name].high)
            for name, value in setting.items()
            if name in self.auto
        }
        return self.at({**self.setting, **chosen})

    @property
    def burden(self) -> tuple[float, ...]:
        return (-self.partition_mb, self.credit_mb)

    def simulate(
        self, work: Workload, network: Medium, buckets: Sequence[PlannedBucket], whole: Collection[int]
    ) -> Run:
        partition, credit = (mb * 2**20 for mb in (self.partition_mb, self.credit_mb))
        return by_priority(work, network, partition=partition, credit=credit, steps=4)

    @property
    def space(self) -> tuple[Dimension, ...]:
        return (Dimension("partition_mb", 0.25, 64), Dimension("credit_mb", 0.5, 256))

    @property
    def setting(self) -> dict[str, float]:
        return {"partition_mb": self.partition_mb, "credit_mb": self.credit_mb}

    def at(self, setting: Setting) -> ByteScheduler:
        other = copy.copy(self)
        vars(other).update(setting)
        return other

    @property
    def conduct(self) -> Hashable:
        return _bytes(self.partition_mb), _bytes(self.credit_mb)

    def plan(self, facts: Facts, specs: Sequence[TensorSpec], shardable: Sequence[bool], world_size: int) -> Plan:
        return plan_buckets(facts, specs, world_size)

    @property
    def collectives(self) -> Collectives:
        return Partitions(self)


class Partitions(DecoupledCollectives):
    """Collectives that split all-reduces into partitions and hand these to the dispatcher."""

    def __init__(self, strategy: ByteScheduler) -> None:
        self._strategy = strategy

    def reduce(self, comm: Communicator, bucket: Bucket) -> None:
        send, recv, size = bucket.outgoing, bucket.incoming, bucket.outgoing.element_size()
        parts = [
            Part(send[span], recv[span], bucket.op, f"{bucket.label}.{part}")
            for part, span in enumerate(partitions(send.numel(), size, _bytes(self._strategy.partition_mb)))
        ]
        credit, lease = max(1, _bytes(self._strategy.credit_mb)), self._strategy.lease
        assert lease is not None, "an optimizer has a dispatcher before it is used"
        bucket.work = lease.submit(bucket.index, parts, bucket.label, credit)


def _bytes(mb: float) -> int:
    return int(min(mb * 2**20, _NO_LIMIT))


def _dispatchers() -> Dispatchers:
    session = current()
    service = session.issuers.get(_SERVICE)
    if not isinstance(service, Dispatchers):
        service = session.issuers[_SERVICE] = Dispatchers(session.channels, session.control, session.heed)
    return service


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
    partition_mb: float | Literal["auto"] | None = "auto",
    credit_mb: float | Literal["auto"] | None = "auto",
    tune: bool | Tuning = False,
    elementwise: bool | None = None,
    per_parameter: bool | None = None,
    sync_start: bool = True,
    poison: bool | None = None,
    broadcast_buffers: bool = True,
    check_every: int | None = None,
    on_nonfinite: str = "raise",
) -> Shell:
    """Distribute `optimizer` with ByteScheduler's schedule. On every rank, after ``bytescheduler_adapter.init()``.

    Args:
        optimizer: any ``torch.optim.Optimizer``. Those that are not known to work element by element are stepped in
            full, inside ``step()``.
        named_parameters: the module, or pairs of name and parameter, or None.
        compression: this, and what follows up to `process_set`: as in
            Horovod; see :class:`overlap.optimizer.arguments.HorovodArguments`. The first rank of a process set decides the
            order for all of it.
        partition_mb: layers travel in partitions of at most this many MB (2^20 bytes), between which a more urgent layer
            goes first. ``"auto"``, or None: ``BYTESCHEDULER_PARTITION`` (elements of 4 bytes), else it is planned: the
            first steps have 1; they are measured, and what follows is simulated to be the fastest. Rank 0's counts.
        credit_mb: a partition is issued while fewer MB than this are under way; less credit preempts sooner, more keeps
            the wire busier. ``"auto"``, or None: ``BYTESCHEDULER_CREDIT`` (elements of 4 bytes), else it is planned; the
            first steps have 2. Rank 0's counts.
        tune: True or ``Tuning(...)`` searches both while training goes on; see :class:`overlap.plan.tuning.options.Tuning`.
            ``BYTESCHEDULER_CREDIT_TUNING=1`` stands for True.
        elementwise: this, and `per_parameter`, `sync_start`, `poison`, `broadcast_buffers`, `check_every`,
            `on_nonfinite`: see :class:`overlap.optimizer.arguments.SharedArguments`.
    """
    arguments = SharedArguments.of(locals())
    wished = current().settings
    tune = tune or wished.tune_credit
    agree_on_strategy("bytescheduler_adapter", tune)
    given: dict[str, float | None] = {
        "partition_mb": wished.partition_mb if partition_mb is None or partition_mb == "auto" else partition_mb,
        "credit_mb": wished.credit_mb if credit_mb is None or credit_mb == "auto" else credit_mb,
    }
    given = agree(current().comm, given)
    chosen = {name: value for name, value in given.items() if value is not None}
    auto = frozenset(given.keys() - chosen.keys())
    strategy = ByteScheduler(**{**_FIRST, **chosen}, auto=auto)
    distributed = Shell(optimizer, named_parameters, strategy, arguments)
    strategy.lease = _dispatchers().lease(current().registry.topic_of(distributed), process_set)
    planning = plan_by_itself(distributed, process_set, follow=tune is False) if auto else None
    start_tuning(distributed, tune, process_set, ready=lambda: planning is None or not planning.under_way)
    return distributed
