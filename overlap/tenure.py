"""How long an optimizer has its parameters: until another one takes them, or all ranks have dropped it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from overlap.engine import Engine
from overlap.work import arrive

__all__ = ["Tenure"]


class Tenure:
    """The engine's hold on its parameters; see :class:`overlap.registry.Owner`, which this is."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._gone = False

    @property
    def unfinished(self) -> bool:
        return self._engine.window.touched

    def has(self, parameters: Sequence[torch.Tensor]) -> bool:
        engine = self._engine
        mine = {id(slot.param) for slot in engine.slots}
        return not self._gone and any(id(parameter) in mine for parameter in parameters)

    def hand_over(self, unfinished: bool) -> None:
        self._gone = True
        self._engine.ended = (
            f"parameters of this optimizer, {self._engine.slots[0].name!r} or others, went to a DistributedOptimizer that "
            "was made later, here or on another rank; step that one, and give every parameter to one optimizer"
        )
        if unfinished:
            self._engine.window.flush()
        self.retire()

    def retire(self) -> None:
        self._engine.transit.arrive_all()
        for bucket in self._engine.order:  # of a backward pass that no step followed
            if bucket.work is not None:
                arrive(bucket.work)
                bucket.work = None
        self._engine.detach()
