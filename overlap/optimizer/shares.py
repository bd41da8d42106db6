"""A model of whose parameters ranks may have shares: who has them, what they are called, a moment to save or to load."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch

from overlap.core.bucket import Slot
from overlap.core.engine import Engine
from overlap.job.session import current

__all__ = ["before_loading", "before_saving", "owners_of", "plain", "state_of"]


def plain(name: str) -> str:
    """A parameter's name without what ``torch.compile`` adds."""
    return name.replace("_orig_mod.", "")


def owners_of(model: torch.nn.Module) -> list[Any]:
    """The distributed optimizers of the model's parameters."""
    return current().registry.having(list(model.parameters()))


def state_of(model: torch.nn.Module, stand_in: Callable[[Engine, Slot], Any]) -> dict[str, Any]:
    """``model.state_dict()``, with what `stand_in` gives for parameters of which this rank has a share. On any rank."""
    with ExitStack() as stack:
        for owner in owners_of(model):
            stack.enter_context(owner._full_state.parameters.replaced(stand_in))
        return model.state_dict()


def before_saving(model: torch.nn.Module, what: str, optimizers: Iterable[Any] = ()) -> None:
    """All ranks have come to the call `what`, with parameters and the state of `optimizers` as of the last step.

    On every rank. Raises on all of them where some have joined.
    """
    for each in dict.fromkeys((*optimizers, *owners_of(model))):
        engine = each._engine
        engine.policy.refuse(what)
        engine.closing.meet(what)
        engine.policy.arrive()
        engine.transit.arrive_all()


def before_loading(model: torch.nn.Module, what: str, optimizers: Iterable[Any] = ()) -> None:
    """As :func:`before_saving`; and parameters that were gathered ahead are gathered anew by the next pass."""
    before_saving(model, what, optimizers)
    for each in owners_of(model):
        each._engine.unsharder.stale = each._engine.unsharder.active
