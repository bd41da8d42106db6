"""Optimal Sharded Data Parallel (Jiang et al., IJCAI 2023): what of a sharded model stays whole, under a memory limit.

compute | fwd L1 | fwd L2 | fwd L3 | bwd L3 | bwd L2 | bwd L1 | step
freed   | AG     | AG     | AG     | AG     | AG     | AG     |        least memory
kept    | AG     | AG     | AG     |                          |        gathered once

Buckets, and the way of their gradients, are those of a sharded model. All begin freed; see `osdp.watching`.
"""

from __future__ import annotations

from typing import Any

import torch

from overlap.plan.partition import BucketSpec
from overlap.plan.plan import Residency
from overlap.plan.sharded import Sharded

__all__ = ["Osdp"]


class Osdp(Sharded):
    """The strategy. `residencies`: of slots, how long they are whole; of others, they are freed after each use."""

    name = "osdp"
    looks = True

    def __init__(
        self,
        threshold_mb: float | None,
        num_nearby_layers: int | None,
        whole_mb: float | None,
        memory_limit: int | None = None,
        gather_dtype: torch.dtype | None = None,
        fsdp_plan: dict[str, str] | None = None,
        *,
        owned: bool = False,
    ) -> None:
        super().__init__(threshold_mb, num_nearby_layers, whole_mb, gather_dtype=gather_dtype, owned=owned)
        self.memory_limit, self.fsdp_plan = memory_limit, fsdp_plan
        self.residencies: dict[int, Residency] = {}

    @property
    def terms(self) -> dict[str, Any]:
        return {**super().terms, "memory_limit": self.memory_limit, "fsdp_plan": self.fsdp_plan}

    def residency(self, spec: BucketSpec) -> Residency:
        found = {self.residencies.get(index, Residency.FREED) for index in spec.tensors}
        return found.pop() if len(found) == 1 else Residency.FREED
