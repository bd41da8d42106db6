"""Options of the strategies that ``dear.DistributedOptimizer(strategy=…)`` hands on, for type checkers and editors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypedDict

import torch

__all__ = ["OwnOptions"]


class OwnOptions(TypedDict, total=False):
    """Options that other strategies take and ``dear`` does not; see the strategy's own ``DistributedOptimizer``."""

    # mgwfbp
    asc: bool
    merge_below_kb: float
    layerwise_times: Mapping[str, float] | None
    profile_steps: int
    alpha_beta: tuple[float, float] | None
    # bytescheduler_adapter
    partition_mb: float | Literal["auto"] | None
    credit_mb: float | Literal["auto"] | None
    # fsdp, osdp
    whole_mb: float | Literal["auto"]
    offload: Literal["cpu"] | None
    # osdp
    memory_limit_gb: float | Literal["auto"]
    fsdp_plan: Mapping[str, str] | Literal["model"] | None
    recompute: Sequence[torch.nn.Module] | Callable[[torch.nn.Module], bool] | bool | None
    # co2
    outer: str
    outer_frequency: int | Literal["auto"]
    outer_lr: float | Literal["auto"]
    outer_momentum: float | Literal["auto"]
    outer_clip: float | Literal["auto"] | None
    gap_penalty: bool | float | Literal["auto"]
    fragments: int | Literal["auto"]
    overlap_steps: int | Literal["auto"]
    bits: int | Literal["auto"] | None
    mixing: float | Literal["auto"]
    top_k: int | Literal["auto"]
    warmup_steps: int
    nprocs_per_node: int | None
