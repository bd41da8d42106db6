"""What strategies share whose ranks have whole parameters while they use them: DeAR's buckets, freed after their use."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch

from overlap.job.groups import ShardGroups
from overlap.plan.assignment import assign_owners
from overlap.plan.fusion import fused_in_order_of_use
from overlap.plan.partition import BucketSpec, TensorSpec
from overlap.plan.plan import Facts, Plan, Residency, Updates, placed
from overlap.plan.strategy import Strategy

__all__ = ["Sharded"]


class Sharded(Strategy):
    """A strategy with buckets of neighbouring layers, of which each rank keeps its share between uses.

    Those of the slots that `stay` are whole from forward to backward; in that time, those in :attr:`post_forward` are
    sharded among ``post_forward_ranks`` neighbours. With `owned`, a share ends where parameters do: each lies whole on one
    rank, for an optimizer that needs whole ones. With `offload`, shares of a model on a GPU are in the host's memory.
    """

    learns = False  # a model may be too large to be whole even once
    post_forward: frozenset[int] = frozenset()

    def __init__(
        self,
        threshold_mb: float | None,
        num_nearby_layers: int | None,
        whole_mb: float | None,
        stay: Collection[int] = (),
        gather_dtype: torch.dtype | None = None,
        param_dtype: torch.dtype | None = None,
        shard_group: ShardGroups = None,
        *,
        owned: bool = False,
        offload: bool = False,
    ) -> None:
        if threshold_mb is not None and not threshold_mb > 0:
            raise ValueError(f"threshold_mb should be at least 0 and is {threshold_mb}")
        if whole_mb is not None and not whole_mb > 0:
            raise ValueError(f"whole_mb should be above 0, or 'auto', and is {whole_mb}")
        self.threshold_mb, self.num_nearby_layers, self.whole_mb = threshold_mb, num_nearby_layers, whole_mb
        self.stay, self.offload = frozenset(stay), offload
        self.updates, self.lanes = (Updates.OWNED, 2) if owned else (Updates.SHARDED, 1)
        self.gather_dtype, self.param_dtype, self.shard_group = gather_dtype, param_dtype, shard_group
        self.carries = gather_dtype is not None  # whoever moves parameters widens them, too

    @property
    def terms(self) -> dict[str, Any]:
        return {
            "threshold_mb": self.threshold_mb,
            "num_nearby_layers": self.num_nearby_layers,
            "whole_mb": self.whole_mb,
            "stay": sorted(self.stay),
            "post_forward": (self.post_forward_ranks, sorted(self.post_forward)),
            "gather_dtype": self.gather_dtype,
            "param_dtype": self.param_dtype,
            "shard_group": self.shard_group,
            "offload": self.offload,
            "two_level": self.two_level,
        }

    def residency(self, spec: BucketSpec) -> Residency:
        if self.stay.issuperset(spec.tensors):
            return Residency.FREED_AFTER_BACKWARD
        return Residency.SHARDED_POST_FORWARD if self.post_forward.issuperset(spec.tensors) else Residency.FREED

    def owners(self, numels: Sequence[int], loads: Sequence[int]) -> tuple[int, ...] | None:
        return assign_owners(numels, loads) if self.updates is Updates.OWNED else None

    def plan(self, facts: Facts, specs: Sequence[TensorSpec], shardable: Sequence[bool], world_size: int) -> Plan:
        seen = [can and index not in facts.unseen for index, can in enumerate(shardable)]
        apart = [
            spec if can else replace(spec, kind=(spec.kind, can), owner=None)
            for spec, can in zip(specs, seen, strict=True)
        ]
        buckets = fused_in_order_of_use(
            facts,
            apart,
            world_size,
            threshold_bytes=None if self.threshold_mb is None else self.threshold_mb * 2**20,
            num_nearby_layers=self.num_nearby_layers,
        )
        return placed(buckets, seen, residency=self.residency)
