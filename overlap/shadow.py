"""A second optimizer of the user's class, with the same attributes: it updates what the first one is not asked to."""

from __future__ import annotations

from collections import OrderedDict

import torch

__all__ = ["shadow_of"]


def shadow_of(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """An optimizer that shares all attributes with `optimizer`, its state and groups too, and has no hooks.

    ``copy.copy`` keeps ``defaults``, ``state`` and ``param_groups`` only, as torch pickles no more of an optimizer; a
    class may have set attributes of its own.
    """
    shadow: torch.optim.Optimizer = object.__new__(type(optimizer))
    vars(shadow).update(vars(optimizer))
    for name, hooks in vars(optimizer).items():
        if name.startswith("_optimizer_") and isinstance(hooks, OrderedDict):
            setattr(shadow, name, OrderedDict())
    return shadow
