"""Wait-free back-propagation (Zhang et al., Poseidon, USENIX ATC 2017): reduce a tensor once its gradient is ready."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from overlap.job.process_set import ProcessSet, global_process_set
from overlap.optimizer.arguments import SharedArguments, refuses_unknown
from overlap.optimizer.dears_arguments import understands_dears_names
from overlap.optimizer.distributed import DistributedOptimizer as Shell
from overlap.optimizer.start import agree_on_strategy
from overlap.plan.partition import TensorSpec, per_tensor
from overlap.plan.plan import Facts, Plan, replicated
from overlap.plan.strategy import Strategy
from overlap.transport.communicator import ReduceOp
from overlap.transport.compression import NoneCompressor

__all__ = ["DistributedOptimizer", "Wfbp"]


class Wfbp(Strategy):
    """WFBP's strategy: one all-reduce per tensor, in the order of rank 0's first gradients, finished in ``step()``."""

    name = "wfbp"

    def plan(self, facts: Facts, specs: Sequence[TensorSpec], shardable: Sequence[bool], world_size: int) -> Plan:
        return replicated(per_tensor(facts.arrivals, specs, world_size))


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
    elementwise: bool | None = None,
    per_parameter: bool | None = None,
    sync_start: bool = True,
    poison: bool | None = None,
    broadcast_buffers: bool = True,
    check_every: int | None = None,
    on_nonfinite: str = "raise",
) -> Shell:
    """Distribute `optimizer` with one all-reduce per tensor. On every rank, after ``wfbp.init()``.

    Args:
        optimizer: any ``torch.optim.Optimizer``.
        named_parameters: the module, or pairs of name and parameter, or None.
        compression: this, and what follows up to `process_set`: as in Horovod; see
            :class:`overlap.optimizer.arguments.HorovodArguments`.
        elementwise: this, and `per_parameter`, `sync_start`, `poison`, `broadcast_buffers`, `check_every`,
            `on_nonfinite`: see :class:`overlap.optimizer.arguments.SharedArguments`.
    """
    arguments = SharedArguments.of(locals())
    agree_on_strategy("wfbp")
    return Shell(optimizer, named_parameters, Wfbp(), arguments)
