"""A model of whose parameters ranks may have shares: who has them, what they are called, a moment to save or to load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from overlap.core.bucket import Slot
from overlap.core.engine import Engine
from overlap.job.session import current
from overlap.transport.objects import allgather_object

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


def before_saving(model: torch.nn.Module, what: str, optimizers: Sequence[Any] = ()) -> list[Any]:
    """All ranks have come to the call `what`, with parameters and the state of `optimizers` as of the last step.

    On every rank. Raises on all of them where some have joined. Returns the optimizers that all ranks have: those that are
    given, and the model's.
    """
    for each in dict.fromkeys((*optimizers, *owners_of(model))):
        each._engine.policy.refuse(what)
        each._engine.participants.refuse(what)
    for each in optimizers:
        each._engine.closing.meet(what)
    found = [*optimizers, *_everywhere([each for each in owners_of(model) if each not in optimizers])]
    for each in found:
        each._engine.policy.arrive()
        each._engine.transit.arrive_all()
    return found


def before_loading(model: torch.nn.Module, what: str, optimizers: Sequence[Any] = ()) -> None:
    """As :func:`before_saving`; and parameters that were gathered ahead are gathered anew by the next pass."""
    for each in before_saving(model, what, optimizers):
        each._engine.unsharder.values_change()


def _everywhere(optimizers: Sequence[Any]) -> list[Any]:
    """Those of `optimizers` that no rank has let go of: one that a script has dropped may be there still on some ranks."""
    session = current()
    topics = {session.registry.topic_of(each): each for each in optimizers}
    everybodys = allgather_object(session.control, list(topics))
    return [each for topic, each in topics.items() if all(topic in theirs for theirs in everybodys)]
