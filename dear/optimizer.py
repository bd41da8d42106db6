"""DeAR: all-reduce taken apart, reduce-scatter under backward and all-gather under the next forward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from dear.schedule import plan_buckets
from overlap.bucket import Bucket
from overlap.communicator import Communicator, ReduceOp
from overlap.observer import Facts
from overlap.optimizer import DistributedOptimizer as Shell
from overlap.partition import TensorSpec
from overlap.strategy import Plan, Strategy

__all__ = ["Dear", "DistributedOptimizer"]

_PARTS = frozenset({"reducescatter", "allgather"})


class Dear(Strategy):
    """Reduce-scatter as buckets fill, the update on this rank's shard, all-gather awaited layer by layer.

    Optimizers that need whole parameters get whole gradients instead: their buckets are all-reduced under backward.
    """

    name = "dear"
    sharding = True

    def __init__(self, threshold_mb: float | None, num_nearby_layers: int | None, exclude_parts: str) -> None:
        if threshold_mb is None and num_nearby_layers is None:
            raise ValueError(
                "threshold_mb and num_nearby_layers are both None: give at least one, e.g. threshold_mb=None, "
                "num_nearby_layers=1 for no tensor fusion"
            )
        if threshold_mb is not None and not threshold_mb > 0:
            raise ValueError(f"threshold_mb should be above 0 and is {threshold_mb}")
        if num_nearby_layers is not None and num_nearby_layers < 1:
            raise ValueError(f"num_nearby_layers should be at least 1 and is {num_nearby_layers}")
        excluded = frozenset(part for part in exclude_parts.replace(",", " ").split() if part)
        if excluded - _PARTS:
            raise ValueError(f"exclude_parts should name {sorted(_PARTS)} and names {sorted(excluded - _PARTS)}")
        self.threshold_mb, self.num_nearby_layers, self.excluded = threshold_mb, num_nearby_layers, excluded

    def plan(self, facts: Facts, specs: Sequence[TensorSpec], shardable: Sequence[bool], world_size: int) -> Plan:
        threshold_bytes = None if self.threshold_mb is None else self.threshold_mb * 2**20
        return plan_buckets(
            facts,
            specs,
            shardable,
            world_size,
            threshold_bytes=threshold_bytes,
            num_nearby_layers=self.num_nearby_layers,
        )

    def reduce(self, comm: Communicator, bucket: Bucket) -> None:
        if "reducescatter" in self.excluded:
            if bucket.holds_parameters:
                bucket.reduced.copy_(bucket.gradients[bucket.own])
        elif bucket.holds_parameters:
            bucket.work = comm.reduce_scatter_async(bucket.gradients, bucket.reduced, ReduceOp.AVG, label=bucket.label)
        else:
            bucket.work = comm.all_reduce_async(bucket.gradients, bucket.gradients, ReduceOp.AVG, label=bucket.label)

    def gather(self, comm: Communicator, bucket: Bucket) -> None:
        if "allgather" not in self.excluded:
            mine = bucket.parameters[bucket.own]
            bucket.work = comm.all_gather_async(mine, bucket.parameters, label=bucket.label)


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module | Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    *,
    threshold_mb: float | None = 25,
    num_nearby_layers: int | None = None,
    exclude_parts: str = "",
    strategy: str = "dear",
    **shell: Any,
) -> Shell:
    """Distribute `optimizer` with DeAR's schedule. On every rank, after ``dear.init()``.

    Args:
        optimizer: any ``torch.optim.Optimizer``.
        model: the module, or Horovod's ``named_parameters``, or None.
        threshold_mb: layers are fused, in the order of their use, while a bucket stays below this many MB (2^20 bytes).
        num_nearby_layers: at most this many layers per bucket; with both limits, the first one reached closes a bucket.
            ``threshold_mb=None, num_nearby_layers=1`` is DeAR without tensor fusion.
        exclude_parts: ``"reducescatter"``, ``"allgather"`` or both leave that part of the communication out, for time
            breakdowns. The training is wrong then.
        strategy: ``"dear"``, or the name of another strategy's package (``"wfbp"``, ``"mgwfbp"``), which then takes the
            other arguments.
        shell: ``backward_passes_per_step=1, elementwise=None, sync_start=True, poison=None``; see
            :class:`overlap.optimizer.DistributedOptimizer`.
    """
    if strategy != "dear":
        return _sibling(strategy, optimizer, model, threshold_mb, num_nearby_layers, exclude_parts, shell)
    return Shell(optimizer, model, Dear(threshold_mb, num_nearby_layers, exclude_parts), **shell)


def _sibling(
    strategy: str,
    optimizer: torch.optim.Optimizer,
    model: Any,
    threshold_mb: float | None,
    num_nearby_layers: int | None,
    exclude_parts: str,
    shell: dict[str, Any],
) -> Shell:
    if (threshold_mb, num_nearby_layers, exclude_parts) != (25, None, ""):
        raise ValueError(f"threshold_mb, num_nearby_layers and exclude_parts belong to 'dear', not to {strategy!r}")
    if strategy == "wfbp":
        import wfbp

        return wfbp.DistributedOptimizer(optimizer, model, **shell)
    if strategy == "mgwfbp":
        import mgwfbp

        return mgwfbp.DistributedOptimizer(optimizer, model, **shell)
    raise ValueError(f"strategy should be 'dear', 'wfbp' or 'mgwfbp' and is {strategy!r}")
