"""Which optimizers update every element, or every parameter, from its own gradient and state alone."""

from __future__ import annotations

import torch

__all__ = ["SCALAR_STATE", "is_elementwise", "is_per_parameter"]

# Exact types: a subclass may do anything. For these, updating a slice of a flattened parameter gives, bit for bit, that
# slice of the whole update, so the work and the state can be split between ranks (ZeRO-1's memory at no extra traffic).
_ELEMENTWISE: frozenset[type[torch.optim.Optimizer]] = frozenset(
    {
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    }
)

# Of these, updating some parameters gives, bit for bit, what an update of all gives them.
_PER_PARAMETER = _ELEMENTWISE | {
    getattr(torch.optim, name) for name in ("Adafactor", "Muon", "SparseAdam") if hasattr(torch.optim, name)
}

# State that is one number for the whole parameter even where the parameter itself is a single number.
SCALAR_STATE = frozenset({"step", "mu", "mu_product", "eta"})


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer` may be applied to slices. ``differentiable=True`` builds a graph through whole parameters."""
    return type(optimizer) in _ELEMENTWISE and not _differentiable(optimizer)


def is_per_parameter(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer` may be applied to some of the parameters at a time, each of them whole."""
    return type(optimizer) in _PER_PARAMETER and not _differentiable(optimizer)


def decides_by_loss(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer` may look at what a closure returns, and call it again: LBFGS, and whom we do not know."""
    return type(optimizer) not in _PER_PARAMETER


def _differentiable(optimizer: torch.optim.Optimizer) -> bool:
    return any(group.get("differentiable", False) for group in optimizer.param_groups)
