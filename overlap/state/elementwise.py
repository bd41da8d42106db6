"""Tells which optimizers update every element, or every parameter, from its own gradient and state alone."""

from __future__ import annotations

import inspect

import torch

__all__ = ["SCALAR_STATE", "divisible", "is_elementwise", "is_per_parameter", "takes_sparse_alone"]

# Updating a slice of a flattened parameter gives, bit for bit, that slice of the whole update, so the work and the state
# can be split between ranks (ZeRO-1's memory at no extra traffic).
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


# What a subclass may have of its own and still update as its base: how it is made, and what it is called. The rest is
# what Python adds to every class.
_HARMLESS = frozenset(
    ("__init__", "__repr__", "__doc__", "__module__", "__qualname__", "__annotations__", "__annotate_func__")
    + ("__dict__", "__weakref__", "__slots__", "__firstlineno__", "__static_attributes__")
)


def base_of(optimizer: torch.optim.Optimizer) -> type:
    """The type whose update `optimizer` makes: the first of its bases that defines an update of its own.

    A subclass counts as its base where it overrides neither ``step`` nor anything else but its construction.
    """
    kind: type = type(optimizer)
    for base in kind.__mro__:
        own = set(vars(base)) - _HARMLESS
        if base in _PER_PARAMETER or not own <= {"step"} or ("step" in own and not _inherited(base)):
            return base
    return kind


def _inherited(kind: type) -> bool:
    """Whether ``step`` stands in `kind` as torch puts it there, around that of its base."""
    above = next((vars(base)["step"] for base in kind.__mro__[1:] if "step" in vars(base)), None)
    return above is not None and inspect.unwrap(vars(kind)["step"]) is inspect.unwrap(above)


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer` may be applied to slices. ``differentiable=True`` builds a graph through whole parameters."""
    return base_of(optimizer) in _ELEMENTWISE and not _differentiable(optimizer)


def is_per_parameter(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer` may be applied to some of the parameters at a time, each of them whole."""
    return base_of(optimizer) in _PER_PARAMETER and not _differentiable(optimizer)


def divisible(
    optimizer: torch.optim.Optimizer, elementwise: bool | None, per_parameter: bool | None
) -> tuple[bool, bool]:
    """Whether `optimizer` may be applied to slices, and to whole parameters one by one: as promised, or as is known."""
    slices = is_elementwise(optimizer) if elementwise is None else elementwise
    return slices, (slices or is_per_parameter(optimizer)) if per_parameter is None else per_parameter


def takes_sparse_alone(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer` refuses dense gradients."""
    return isinstance(optimizer, torch.optim.SparseAdam)


def decides_by_loss(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer` may look at a closure's loss and call it again: LBFGS, and types that we do not know."""
    return base_of(optimizer) not in _PER_PARAMETER


def _differentiable(optimizer: torch.optim.Optimizer) -> bool:
    return any(group.get("differentiable", False) for group in optimizer.param_groups)
