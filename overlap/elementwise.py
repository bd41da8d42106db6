"""Which optimizers update every element from that element's own gradient and state alone."""

from __future__ import annotations

import torch

__all__ = ["SCALAR_STATE", "is_elementwise"]

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

# State that is one number for the whole parameter even where the parameter itself is a single number.
SCALAR_STATE = frozenset({"step", "mu", "mu_product", "eta"})


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer` may be applied to slices. ``differentiable=True`` builds a graph through whole parameters."""
    if type(optimizer) not in _ELEMENTWISE:
        return False
    return not any(group.get("differentiable", False) for group in optimizer.param_groups)
