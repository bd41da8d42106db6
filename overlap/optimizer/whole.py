"""``whole(model)``: a model's parameters on every rank, where a strategy keeps a share of them on each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from overlap.job.session import current

__all__ = ["whole"]


@contextmanager
def whole(model: torch.nn.Module) -> Iterator[None]:
    """A context in which all parameters of `model` are whole on every rank, as ``fsdp`` keeps them in shares.

    Inside, any rank may use the model as in one process, alone: evaluate it, call its methods, generate, copy it. What is
    written to parameters counts afterwards, if every rank writes the same. Under other strategies it does nothing. Each
    rank needs memory for the whole model.

    On every rank, between ``step()`` and the next forward. Raises ``RuntimeError`` inside a forward pass, and for a
    ``step()`` inside.
    """
    opened = []
    with ExitStack() as stack:
        for optimizer in current().registry.having(list(model.parameters())):
            engine = optimizer._engine
            if engine.unsharder.active:
                engine.closing.meet("whole()")
                stack.enter_context(engine.unsharder.whole())
                opened.append(engine)
        yield
    for engine in opened:
        engine.closing.meet("the end of whole()")  # a rank that reads the model now asks the others for their shares
