"""A bucket whose whole parameters and gradients a rank has while they are used: between uses it keeps its share.

before_gather ─▶ gathered ─▶ unshard ─▶ … ─▶ reshard ─▶ rest      when is decided by `overlap.core.unsharding`
"""

from __future__ import annotations

import math
from typing import Any

import torch

from overlap.core.bucket import Bucket, Freed, Slot
from overlap.core.flat_buffer import FlatBuffer
from overlap.core.gates.holders import Strangers
from overlap.plan.partition import BucketSpec, pieces

__all__ = ["FreedBucket"]


class FreedBucket(Bucket):
    """A bucket that its plan frees. Its arguments are those of :class:`.Bucket`."""

    opened = False  # parameters are whole and exact, for whoever reads or writes them
    _away = False  # they have left the flat buffer for this rank's shard

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._kept: torch.Tensor | None = None
        self._sent: FlatBuffer | None = None  # gradients that travel in another type …
        self._received: FlatBuffer | None = None  # … and this rank's share of them
        self.parameters.shard.copy_(self.parameters.whole[self.own])
        for place, slot in enumerate(self.slots):
            whole, used = (each.view(place, slot.param) for each in (self.parameters, self._used))
            if slot.freed is None:
                away, sent, zero = (whole.new_full((), value).expand(whole.shape) for value in (math.nan, math.nan, 0))
                gone = used.new_full((), math.nan).expand(used.shape) if self.narrow else away
                slot.freed = Freed(whole, used, away, gone, sent, zero)
            else:
                slot.freed = slot.freed._replace(whole=whole, used=used)
            if self.narrow:
                slot.param.grad_dtype = whole.dtype  # autograd widens gradients, each once
        self._away = True
        self.reshard()
        self.rest()
        self.free_gradients()

    def adopt(self, strangers: Strangers | None = None) -> list[Slot]:
        """As :meth:`.Bucket.adopt`; parameters that are away stay there.

        Raises ``RuntimeError`` where a script has replaced the memory of one.
        """
        if not self._away:
            return super().adopt(strangers)
        self._refuse_replaced()
        return []

    @property
    def _used(self) -> FlatBuffer:
        """What parameters show while passes use them."""
        narrow = None if self.master is None or not self.master.used else self.master.buffer
        return self.parameters if narrow is None else narrow

    @property
    def narrow(self) -> bool:
        """Whether parameters are of 16 bits while passes use them."""
        return self.master is not None and self.master.used

    def free_gradients(self) -> None:
        self.gradients.free()
        if self._sent is not None:
            self._sent.free()

    def sends(self, dtype: torch.dtype) -> torch.Tensor:
        whole = self.gradients.whole
        self._sent = FlatBuffer(self.spec, slice(0, 0), dtype, whole.device, freed=True)
        return self._sent.whole

    def receives(self, dtype: torch.dtype) -> torch.Tensor:
        shard = self.gradients.shard
        spec = BucketSpec((), (), shard.numel(), shard.numel())
        self._received = FlatBuffer(spec, slice(0, 0), dtype, shard.device, freed=True)
        return self._received.whole

    def received(self) -> None:
        if self._received is not None:
            self._received.free()

    def stand_in(self) -> None:
        for slot in self.slots:
            slot.param.grad = None if slot.unused or slot.freed is None else slot.freed.sent

    def keep_averages(self) -> None:
        if self._kept is None:
            self._kept = self.gradients.shard.clone()

    def add_kept(self) -> None:
        kept, self._kept = self._kept, None
        if kept is not None:
            numels = [slot.param.numel() for slot in self.slots]
            for place, _, inside in pieces(self.spec, numels, self.own):
                slot = self.slots[place]
                if slot.freed is not None and slot.aside is slot.freed.sent:
                    self.gradients.shard[inside].add_(kept[inside])

    def before_gather(self, *, exact: bool, poison: bool) -> None:
        """Parameters are about to be gathered: rounded, where they are used so, or `exact`. `poison`: as in `reshard`."""
        into, master = self.parameters if exact else self._used, None if exact else self.master
        if not into.there:
            into.restore()
            if poison:
                into.whole.fill_(math.nan)
        self.travelling = self.parameters.whole if master is None else master.wire
        self.wide_parameters = None if master is None else self._wide
        if master is not None:
            assert master.buffer is not None
            master.buffer.restore()
            if self.wide_parameters is None:
                master.pack()

    def gathered(self) -> None:
        """Parameters have come."""
        master = self.master
        if master is None or master.used or self.travelling is not master.wire:
            return
        if self.wide_parameters is None:
            master.land()
        assert master.buffer is not None
        master.buffer.free()

    def unshard(self, *, exact: bool = False) -> None:
        """Parameters, which were gathered, are whole. Raises ``RuntimeError`` for one that was converted meanwhile."""
        self.opened = exact
        for slot in self.slots:
            assert slot.freed is not None
            param, freed = slot.param, slot.freed
            if param.dtype is not freed.whole.dtype and param.dtype is not freed.used.dtype:
                raise RuntimeError(
                    f"parameter {slot.name!r} was converted from {freed.whole.dtype} to {param.dtype} while each rank has "
                    "a share of it: convert the model before its optimizer is made"
                )
            param.data = freed.whole if exact else freed.used

    def reshard(self, *, poison: bool = False) -> None:
        """Parameters are away, and their memory is free; with `poison`, it is NaN instead."""
        self.opened = False
        for slot in self.slots:
            assert slot.freed is not None
            slot.param.data = slot.freed.gone
        for buffer in {self.parameters, self._used}:
            if not poison:
                buffer.free()
            elif buffer.there:
                buffer.whole.fill_(math.nan)
                buffer.there = False

    def rest(self) -> None:
        """Parameters, which no pass uses, are away, and of their own type.

        Not while a graph is made: with another type comes another end of it, and one that uses a parameter twice would
        bring its gradient in two parts.
        """
        for slot in self.slots:
            assert slot.freed is not None
            slot.param.data = slot.freed.away

    def _refuse_replaced(self) -> None:
        for slot in self.slots:
            assert slot.freed is not None
            if slot.param.data_ptr() not in slot.freed.places:
                raise RuntimeError(
                    f"the memory of parameter {slot.name!r} was replaced (p.data = …), and each rank keeps a share of it "
                    "elsewhere: load values by model.load_state_dict(), on every rank"
                )
