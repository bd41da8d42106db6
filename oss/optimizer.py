"""The oss strategy: one rank owns each parameter, receives its averaged gradient, updates it and sends it to all.

compute | bwd L3 | bwd L2 | bwd L1 | step  |  fwd L1 | fwd L2 | fwd L3 |
comm             | RS b0  | RS b1  | RS b2 | AG b2 | AG b1  | AG b0  |

The owners are fairscale's (`overlap.plan.assignment`), the schedule is DeAR's. A bucket's shards end where the parameters
of one owner end, so that what was a reduction to each owner is one reduce-scatter: it uses both directions of every link.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Literal

import torch

from oss.fairscale import refuse_fairscales_names
from overlap.job.process_set import ProcessSet, global_process_set
from overlap.job.session import current
from overlap.optimizer.arguments import SharedArguments, refuses_unknown
from overlap.optimizer.dears_arguments import understands_dears_names
from overlap.optimizer.distributed import DistributedOptimizer as Shell
from overlap.optimizer.planning import plan_by_itself
from overlap.optimizer.start import agree_on_strategy
from overlap.optimizer.tuning import tune as start_tuning
from overlap.plan.assignment import assign_owners
from overlap.plan.fusion import fused_in_order_of_use, limits, size_and_device
from overlap.plan.partition import TensorSpec
from overlap.plan.plan import Facts, Plan, Updates, placed
from overlap.plan.simulation.events import Run
from overlap.plan.simulation.methods import SIZES_MB, sizes_near
from overlap.plan.simulation.network import Medium
from overlap.plan.simulation.schedules import decoupled
from overlap.plan.simulation.workload import Bucket, Workload
from overlap.plan.strategy import PlannedStrategy
from overlap.plan.tuning.options import Tuning
from overlap.plan.tuning.space import Dimension, Setting
from overlap.transport.communicator import ReduceOp
from overlap.transport.compression import NoneCompressor

__all__ = ["DistributedOptimizer", "Oss"]


class Oss(PlannedStrategy):
    """The strategy: gradients are reduced to the owners of whole parameters, which update them and gather them by
    layer.

    Where an optimizer has to see all parameters at once, buckets are all-reduced and every rank updates everything.
    """

    name = "oss"
    updates = Updates.OWNED
    lanes = 2
    carries = True

    def __init__(
        self,
        threshold_mb: float | None,
        num_nearby_layers: int | None,
        gather_dtype: torch.dtype | None,
        *,
        auto: bool = False,
    ) -> None:
        if threshold_mb is not None and not threshold_mb > 0:
            raise ValueError(f"threshold_mb should be at least 0 and is {threshold_mb}")
        self.threshold_mb, self.num_nearby_layers, self.gather_dtype = threshold_mb, num_nearby_layers, gather_dtype
        self.auto = auto  # whether a planner may choose `threshold_mb`

    @property
    def planned(self) -> dict[str, float]:
        return self.setting if self.auto else {}

    @property
    def candidates(self) -> Sequence[Oss]:
        return [self.at({"threshold_mb": mb}) for mb in SIZES_MB] if self.auto else ()

    @property
    def neighbours(self) -> Sequence[Oss]:
        if not self.auto or self.threshold_mb is None:
            return ()
        return [self.at({"threshold_mb": mb}) for mb in sizes_near(self.threshold_mb)]

    @property
    def burden(self) -> tuple[float, ...]:
        return (-(self.threshold_mb or 0.0),)

    def simulate(self, work: Workload, network: Medium, buckets: Sequence[Bucket], whole: Collection[int]) -> Run:
        return decoupled(work, network, buckets, whole=whole, lanes=self.lanes, steps=4)

    @property
    def space(self) -> tuple[Dimension, ...]:
        return () if self.threshold_mb is None else (Dimension("threshold_mb", 1, 256),)

    @property
    def setting(self) -> dict[str, float]:
        return {} if self.threshold_mb is None else {"threshold_mb": self.threshold_mb}

    @property
    def terms(self) -> dict[str, Any]:
        return {
            "threshold_mb": self.threshold_mb or 0,
            "gather_dtype": self.gather_dtype,
            "planned": sorted(self.planned),  # only some ranks would measure
        }

    def at(self, setting: Setting) -> Oss:
        other = copy.copy(self)
        other.threshold_mb = setting["threshold_mb"]
        return other

    def owners(self, numels: Sequence[int], loads: Sequence[int]) -> tuple[int, ...]:
        return assign_owners(numels, loads)

    def plan(self, facts: Facts, specs: Sequence[TensorSpec], shardable: Sequence[bool], world_size: int) -> Plan:
        buckets = fused_in_order_of_use(
            facts,
            specs,
            world_size,
            threshold_bytes=None if self.threshold_mb is None else self.threshold_mb * 2**20,
            num_nearby_layers=self.num_nearby_layers,
        )
        return placed(buckets, shardable)


@understands_dears_names
@refuses_unknown(refuse_fairscales_names)
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
    threshold_mb: float | Literal["auto"] | None = "auto",
    gather_dtype: torch.dtype | None = None,
    tune: bool | Tuning = False,
    elementwise: bool | None = None,
    per_parameter: bool | None = None,
    sync_start: bool = True,
    poison: bool | None = None,
    broadcast_buffers: bool = True,
    check_every: int | None = None,
    on_nonfinite: str = "raise",
) -> Shell:
    """Distribute `optimizer` so that each parameter is updated, whole, by one rank. On every rank, after ``oss.init()``.

    Args:
        optimizer: any ``torch.optim.Optimizer``. Its state is kept by owners where parameters may be updated apart from
            each other: all of torch's but LBFGS, and those for which `per_parameter` promises it. Others are stepped
            in full on every rank.
        named_parameters: the module, or pairs of name and parameter, or None.
        compression: this, and what follows up to `process_set`: as in Horovod; see
            :class:`overlap.optimizer.arguments.HorovodArguments`. A compression of one's
            own needs whole gradients: every rank updates everything then.
        threshold_mb: layers are fused, in the order of their use, while a bucket stays below this many MB (2^20 bytes); 0:
            a bucket for each layer. ``"auto"``: what the environment variable ``DEAR_THRESHOLD_MB`` (MB), or
            ``HOROVOD_FUSION_THRESHOLD`` (bytes), says; else it is planned: it begins with a 32nd of the parameters that are
            trained, an eighth on a GPU, at least 1 and at most 25, and after some steps takes what is simulated to be the
            fastest, from 1 to 64. None is ``"auto"``, too. A larger parameter has a bucket of its own; none is split.
        gather_dtype: ``torch.bfloat16`` or ``torch.float16``: updated parameters travel, and are used by every rank,
            rounded to this type; owners keep the exact ones, which ``optimizer.state_dict()["master"]`` holds. Raises
            ``ValueError`` where every rank updates everything, ``TypeError`` for parameters of other types than float32
            and float64.
        tune: True or ``Tuning(...)`` searches `threshold_mb` while training goes on; who owns what stays the same. See
            :class:`overlap.plan.tuning.options.Tuning`.
        elementwise: this, and `per_parameter`, `sync_start`, `poison`, `broadcast_buffers`, `check_every`,
            `on_nonfinite`: see :class:`overlap.optimizer.arguments.SharedArguments`.

    fairscale's names raise ``TypeError`` with the counterpart.
    """
    arguments = SharedArguments.of(locals())
    agree_on_strategy("oss", tune)
    wished = current().settings.threshold_mb if threshold_mb in ("auto", None) else threshold_mb
    auto = wished in ("auto", None)
    chosen = limits("auto" if wished is None else wished, None, *size_and_device(optimizer))
    distributed = Shell(optimizer, named_parameters, Oss(*chosen, gather_dtype, auto=auto), arguments)
    planning = plan_by_itself(distributed, process_set, follow=tune is False) if auto else None
    start_tuning(distributed, tune, process_set, ready=lambda: planning is None or not planning.under_way)
    return distributed
