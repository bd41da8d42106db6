"""What strategies share that free parameters after their use: how much is fused, and what they refuse."""

from __future__ import annotations

from typing import Any, Literal

import torch

from overlap.job.session import current
from overlap.optimizer.arguments import SharedArguments
from overlap.plan.fusion import limits, size_and_device
from overlap.state.elementwise import divisible
from overlap.transport.cuda import streams

__all__ = ["module_of", "needs_owners", "refuse_offload_of_owned", "refuse_what_is_lost", "sizes"]


def sizes(
    optimizer: torch.optim.Optimizer,
    threshold_mb: float | Literal["auto"] | None = "auto",
    whole_mb: float | Literal["auto"] = "auto",
) -> tuple[float | None, int | None, float | None]:
    """For :class:`overlap.plan.sharded.Sharded`, with what the arguments leave to be chosen."""
    wished = current().settings.threshold_mb if threshold_mb in ("auto", None) else threshold_mb
    chosen = limits("auto" if wished is None else wished, None, *size_and_device(optimizer))
    return (*chosen, None if whole_mb == "auto" else whole_mb)


def needs_owners(optimizer: torch.optim.Optimizer, arguments: SharedArguments) -> bool:
    """Whether `optimizer` takes whole parameters, by its type or by the promises in `arguments`, so each has an owner."""
    elementwise, _ = divisible(optimizer, arguments.elementwise, arguments.per_parameter)
    return bool(arguments.per_parameter) or not elementwise


def refuse_offload_of_owned(optimizer: torch.optim.Optimizer) -> None:
    """Raise ``ValueError`` where shares are to be offloaded from a device, and are whole parameters, each on one rank."""
    if any(streams.on_device(each) for group in optimizer.param_groups for each in group["params"]):
        raise ValueError(
            f"offload='cpu' with {type(optimizer).__name__}, which needs whole parameters: only shares that may be cut "
            "anywhere are offloaded; leave it out, or take an optimizer that works element by element"
        )


def module_of(named_parameters: Any, strategy: str) -> torch.nn.Module:
    """The model, where it was given and no parameter would be lost. Raises ``TypeError`` or ``ValueError``."""
    if not isinstance(named_parameters, torch.nn.Module):
        raise TypeError(
            f"{strategy} gathers parameters before a module uses them, so it needs the module, and was given "
            f"{type(named_parameters).__name__}: pass the model as the second argument"
        )
    refuse_what_is_lost(named_parameters, strategy)
    return named_parameters


def refuse_what_is_lost(model: torch.nn.Module, strategy: str) -> None:
    """Raise ``ValueError`` where forward writes to parameters that are freed after it."""
    for name, module in model.named_modules():
        if getattr(module, "max_norm", None) is not None and isinstance(
            module, torch.nn.Embedding | torch.nn.EmbeddingBag
        ):
            raise ValueError(
                f"{name!r} has max_norm={module.max_norm}, by which forward shortens rows of its weight, and {strategy} "
                "frees what forward has written: leave max_norm out, or use strategy='dear'"
            )
