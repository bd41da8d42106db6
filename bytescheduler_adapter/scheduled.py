"""``ScheduledOptimizer``, ByteScheduler's own call, around an optimizer that is distributed already."""

from __future__ import annotations

from numbers import Integral

import torch

from bytescheduler_adapter.optimizer import ByteScheduler, DistributedOptimizer
from overlap.optimizer.distributed import DistributedOptimizer as Shell

__all__ = ["ScheduledOptimizer"]


def ScheduledOptimizer(
    model: torch.nn.Module,
    hvd_opt: torch.optim.Optimizer,
    num_steps: int = 10**6,
) -> Shell:
    """The optimizer that schedules `model`'s communication. On every rank.

    Args:
        model: the module whose parameters `hvd_opt` has.
        hvd_opt: what ``bytescheduler_adapter.DistributedOptimizer`` returned, which is returned again, or an optimizer that
            is not distributed yet.
        num_steps: how often ``step()`` will be called, at least once. ByteScheduler finishes in the last step; here whoever
            looks at parameters waits for them, after any step.

    Raises ``TypeError`` for an optimizer that another strategy has distributed, ``ValueError`` for parameters that are not
    `model`'s.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"ScheduledOptimizer takes the model first, a torch.nn.Module, and got {type(model).__name__}")
    if not isinstance(num_steps, Integral) or num_steps < 1:
        raise ValueError(f"num_steps should be a whole number of at least 1 and is {num_steps!r}")
    if isinstance(hvd_opt, Shell) and not isinstance(hvd_opt.strategy, ByteScheduler):
        raise TypeError(
            f"ScheduledOptimizer got an optimizer that the strategy {hvd_opt.strategy.name!r} has distributed: "
            "distribute it with bytescheduler_adapter.DistributedOptimizer, or pass the optimizer itself"
        )
    own = {id(param) for param in model.parameters()}
    strangers = sum(id(param) not in own for group in hvd_opt.param_groups for param in group["params"])
    if strangers:
        raise ValueError(f"the optimizer has {strangers} parameters that are not the model's: pass their model")
    return hvd_opt if isinstance(hvd_opt, Shell) else DistributedOptimizer(hvd_opt, model)
