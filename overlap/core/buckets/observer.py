"""Observes, in the first iteration, in which order parameters are used and gradients arrive.

Filled while the first training iteration runs, turned into :class:`Facts` at its end. Rank 0's facts decide for all.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from overlap.core.bucket import Slot
from overlap.core.gates.compiled import only_looked_at
from overlap.plan.plan import Facts
from overlap.transport.stamps import Stamp, Stamps

__all__ = ["Observer"]


@dataclass
class Observer:
    """The observations of one iteration."""

    slots: list[Slot]
    stamps: Stamps = field(default_factory=Stamps)
    units: list[tuple[object, list[int]]] = field(default_factory=list)
    _touched: set[int] = field(default_factory=set)
    _arrivals: dict[int, Stamp] = field(default_factory=dict)
    _reread: set[int] = field(default_factory=set)
    _depth: list[torch.nn.Module] = field(default_factory=list)

    def enter(self, module: torch.nn.Module) -> None:
        self._depth.append(module)

    def leave(self, module: torch.nn.Module) -> None:
        if self._depth and self._depth[-1] is module:
            self._depth.pop()

    def touch(self, slot: Slot) -> None:
        """Note that a parameter was handed out; it counts as used if a training forward is running."""
        if slot.index in self._arrivals and torch._C._current_graph_task_id() >= 0:
            self._reread.add(slot.index)
        if not self._depth or not torch.is_grad_enabled() or slot.index in self._touched:
            return
        layer = self._depth[-1]
        if only_looked_at(slot.param, layer):
            return
        self._touched.add(slot.index)
        if not self.units or self.units[-1][0] is not layer:
            self.units.append((layer, []))
        self.units[-1][1].append(slot.index)

    def gradient(self, slot: Slot) -> None:
        self._arrivals.pop(slot.index, None)  # the last accumulation completes it
        self._arrivals[slot.index] = self.stamps.now()
        self._reread.discard(slot.index)

    def finish(self) -> Facts:
        arrived = list(self._arrivals)
        with_gradient = set(arrived) | {slot.index for slot in self.slots if slot.param.grad is not None}
        units = [tuple(unit) for _, unit in self.units]
        rest = [slot.index for slot in self.slots if slot.index not in self._touched]
        seconds = self.stamps.reader()
        came = {index: seconds(stamp) for index, stamp in self._arrivals.items()}
        first, last = min(came.values(), default=0.0), max(came.values(), default=0.0)
        return Facts(
            units=(*units, *((index,) for index in rest)),
            arrivals=(*arrived, *(slot.index for slot in self.slots if slot.index not in self._arrivals)),
            fires=tuple(slot.fires for slot in self.slots),
            unseen=frozenset(index for index in rest if index in with_gradient),
            idle=frozenset(slot.index for slot in self.slots if slot.index not in with_gradient),
            reread=frozenset(self._reread),
            moments=tuple(came.get(slot.index, last) - first for slot in self.slots),
        )
