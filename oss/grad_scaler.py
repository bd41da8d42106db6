"""A GradScaler whose ranks skip the same steps."""

from __future__ import annotations

from typing import Any

import torch

from oss.ranks import ranks_of
from overlap.optimizer.arguments import refuses_unknown

__all__ = ["ShardedGradScaler"]


class ShardedGradScaler(torch.amp.GradScaler):
    """torch's GradScaler for any optimizer and device; where any rank finds an infinity or a NaN, all skip the step.

    Args:
        init_scale: this, and what follows up to `enabled`: as in ``torch.amp.GradScaler``.
        process_group: the ranks that agree; None: torch.distributed's default group, or this process where it is alone.

    Gradients in float16 are unscaled, too. ``unscale_()`` and ``step()`` are calls of every rank of the group, those too
    that have no gradients. They raise ``RuntimeError`` where several processes were started and have no process group.
    """

    @refuses_unknown(of="ShardedGradScaler")
    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: Any = None,
    ) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._process_group = process_group
        if process_group is not None:
            ranks_of(process_group)

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        """Called by torch's ``unscale_()`` and ``step()``. Gives its flag for each device, the same on all ranks."""
        ranks = ranks_of(self._process_group)  # now: the script may have made its group after the scaler
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, True)
        near = next(iter(found), found_inf.device)
        (agreed,) = ranks.reduce([max((float(flag) for flag in found.values()), default=0.0)], near)
        # A rank without gradients has looked at none, and goes on by what the others have found.
        return {device: torch.full_like(found_inf, agreed, device=device) for device in (found or [found_inf.device])}
