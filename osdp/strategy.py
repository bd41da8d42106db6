"""Optimal Sharded Data Parallel (Jiang et al., IJCAI 2023): what of a sharded model stays whole, under a memory limit.

compute | fwd L1 | fwd L2 | fwd L3 | bwd L3 | bwd L2 | bwd L1 | step
freed   | AG     | AG     | AG     | AG     | AG     | AG     |        least memory
kept    | AG     | AG     | AG     |                          |        gathered once

Buckets, and the way of their gradients, are those of a sharded model. All begin freed; see `osdp.watching`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from osdp.activations import Blocks
from overlap.job.groups import ShardGroups
from overlap.plan.partition import BucketSpec
from overlap.plan.plan import Residency
from overlap.plan.sharded import Sharded

__all__ = ["Osdp"]


class Osdp(Sharded):
    """The strategy. `residencies`: of slots, how long they are whole; of others, they are freed after each use.

    `blocks` of the model may be computed again. With the `residency` "host", buckets may lie once on each host.
    """

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
        blocks: Blocks | None = None,
        shard_group: ShardGroups = None,
        owned: bool = False,
        offload: bool = False,
        residency: str | None = None,
    ) -> None:
        _refuse_beside(
            residency,
            {
                f"{gather_dtype=}": gather_dtype is not None,
                f"{shard_group=}": shard_group is not None,
                "offload='cpu'": offload,
                "an optimizer that needs whole parameters": owned,
            },
        )
        super().__init__(
            threshold_mb,
            num_nearby_layers,
            whole_mb,
            gather_dtype=gather_dtype,
            shard_group=shard_group,
            owned=owned,
            offload=offload,
        )
        self.memory_limit, self.fsdp_plan = memory_limit, fsdp_plan
        self.blocks, self.some_on_host = blocks, residency is not None
        self.residencies: dict[int, Residency] = {}

    @property
    def terms(self) -> dict[str, Any]:
        blocks = () if self.blocks is None else self.blocks.names
        return {
            **super().terms,
            "memory_limit": self.memory_limit,
            "fsdp_plan": self.fsdp_plan,
            "recompute": blocks,
            "residency": "host" if self.some_on_host else None,
        }

    def residency(self, spec: BucketSpec) -> Residency:
        found = {self.residencies.get(index, Residency.FREED) for index in spec.tensors}
        return found.pop() if len(found) == 1 else Residency.FREED


def _refuse_beside(residency: str | None, beside: Mapping[str, bool]) -> None:
    if residency not in (None, "host"):
        raise ValueError(f"residency should be 'host', or None for parameters of each rank's own, and is {residency!r}")
    given = ", ".join(name for name, there in beside.items() if there)
    if residency is not None and given:
        raise ValueError(f"residency={residency!r} does not go together with {given}: leave one of them out")
