"""The averaged gradients between backward and step(): settled early, clipped, read by a GradScaler, changed by the user.

LOCAL ── settle ──▶ SETTLED (shards hold averages, `.grad` of sharded parameters does not)
      └─ synchronize ──▶ SYNCHRONIZED (`.grad` holds averages everywhere and may be changed)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from overlap.core.engine import Engine
from overlap.features.clipping import clip_sharded
from overlap.features.loss_scale import any_nonfinite, show_infinity, unscale
from overlap.features.sparse import values_of
from overlap.transport.objects import broadcast_object

__all__ = ["Averages"]


class Averages:
    """What the gradients of one optimizer are, from the last backward to the step. All methods: on every rank."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._comm = engine, engine.comm

    @property
    def synchronized(self) -> bool:
        return self._engine.window.synchronized

    @property
    def infinities_shown(self) -> bool:
        return self._engine.window.infinities_shown

    def close(self, call: str) -> None:
        """Everything reduced or on its way, unless it is already."""
        if not (self.synchronized or self.infinities_shown):
            self._engine.close(call)

    def refuse(self, what: str) -> None:
        """Raise where parameters are updated before ``step()``: nothing can be done to all gradients before that."""
        if self._engine.eager is not None:
            self._engine.eager.refuse(what)

    def _settle(self, call: str) -> None:
        engine, window = self._engine, self._engine.window
        self.close(call)
        window.settle()
        if not window.reduced:
            for bucket in engine.order:
                if not bucket.holds_parameters:
                    bucket.expose()
        window.reduced = True

    @torch.no_grad()
    def synchronize(self, call: str = "synchronize()") -> None:
        """Make ``.grad`` the average everywhere; `call` is what the script has called."""
        if self.synchronized:
            return
        self.refuse("synchronize()")
        engine = self._engine
        engine.close(call)
        engine.window.settle()
        engine.attendance.announce("synchronize")
        engine.window.reduced = True
        for bucket in engine.order:
            if bucket.holds_parameters:
                label = f"{bucket.label} gradients"
                self._comm.all_gather(bucket.reduced, bucket.gradients, counts=bucket.shares, label=label)
                bucket.find_unused()
        for bucket in engine.order:
            bucket.expose()
        engine.window.synchronized = True

    def take_synchronized(self) -> None:
        """``.grad``, as the user left it after :meth:`synchronize`, is what shards are updated with."""
        for bucket in self._engine.order:
            if bucket.holds_parameters:
                for slot in bucket.slots:
                    slot.fill()
                bucket.reduced.copy_(bucket.gradients[bucket.own])
                self._engine.sharded.take(bucket)

    @torch.no_grad()
    def share(self) -> None:
        """After :meth:`synchronize`, which joined ranks followed: give them ``.grad`` as the others' script left it."""
        engine = self._engine
        if not engine.attendance.absent:
            return
        leader = engine.attendance.leader
        for bucket in engine.order:
            for slot in bucket.slots:
                slot.fill()
            self._comm.broadcast(bucket.gradients, leader, label=f"{bucket.label} gradients")
            bucket.find_unused()
            bucket.expose()
        for slot in engine.slots:
            if slot.sparse:
                slot.param.grad = broadcast_object(self._comm, slot.param.grad, leader)

    @torch.no_grad()
    def clip(
        self, wanted: Callable[[torch.Tensor], bool], max_norm: float, norm_type: float, error_if_nonfinite: bool
    ) -> torch.Tensor:
        """Clip the averaged gradients of the `wanted` parameters by their total norm."""
        engine = self._engine
        params = [slot.param for slot in engine.slots if wanted(slot.param)]
        self.refuse("clipping by a norm over all gradients")
        if engine.shards is None or self.synchronized:  # whole averages on every rank: torch's own clipping
            self.synchronize("clip_grad_norm_()")
            self._refuse_sparse(wanted)
            return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite)
        self._settle("clip_grad_norm_()")
        self._refuse_sparse(wanted)
        engine.attendance.announce(
            "clip",
            indices=[slot.index for slot in engine.slots if wanted(slot.param)],
            max_norm=max_norm,
            norm_type=norm_type,
            error_if_nonfinite=error_if_nonfinite,
        )
        alike = [param.grad for param in self._whole_params() if param.grad is not None and wanted(param)]
        pieces = engine.shards.gradients(wanted)
        norm, factor = clip_sharded(self._comm, pieces, alike, params, max_norm, norm_type, error_if_nonfinite)
        self._scale_local(factor, wanted)
        return norm

    def _scale_local(self, factor: float, wanted: Callable[[torch.Tensor], bool]) -> None:
        """Averages in shards were scaled: ``.grad`` is to follow, if anything is added to it later."""
        if factor != 1:
            scales = self._engine.window.scales
            for bucket in self._engine.order:
                for slot in bucket.slots if bucket.holds_parameters else ():
                    if wanted(slot.param):
                        scales[slot.index] = scales.get(slot.index, 1.0) * factor

    def _refuse_sparse(self, wanted: Callable[[torch.Tensor], bool]) -> None:
        sparse = [slot.name for slot in self._engine.slots if slot.sparse and wanted(slot.param)]
        if sparse:
            raise TypeError(
                f"the gradient of {sparse[0]!r} is sparse, and torch's clip_grad_norm_ takes dense gradients: wrap the "
                "optimizer with sparse_as_dense=True"
            )

    def _whole_params(self) -> Iterator[torch.nn.Parameter]:
        engine = self._engine
        yield from (slot.param for bucket in engine.order if not bucket.holds_parameters for slot in bucket.slots)
        yield from (slot.param for slot in engine.slots if slot.sparse)

    # - GradScaler: see [Note: one verdict on infinities] in `overlap.features.loss_scale`

    @torch.no_grad()
    def reveal_infinities(self) -> None:
        """A GradScaler is about to look for infinities in ``.grad``: let every rank's show the verdict of all."""
        engine = self._engine
        self.refuse("a GradScaler's look at all gradients")
        if engine.shards is None:
            self.synchronize("a GradScaler's step")
        if self.synchronized:
            return
        self._settle("a GradScaler's step")
        engine.attendance.announce("reveal")
        whole = [values_of(param.grad) for param in self._whole_params() if param.grad is not None]
        bad = any_nonfinite(self._comm, [*(b.reduced for b in engine.order if b.holds_parameters), *whole])
        show_infinity(bad, engine.slots)
        engine.window.infinities_shown = True

    @torch.no_grad()
    def unscale(self, scale: torch.Tensor) -> None:
        """Divide the averages by the loss scale, shards where they lie."""
        engine = self._engine
        if engine.shards is None or self.synchronized:
            unscale((slot.param.grad for slot in engine.slots), scale)
        else:
            unscale((param.grad for param in self._whole_params()), scale)
            unscale(engine.shards.gradients(lambda _param: True), scale)
            self._scale_local(1.0 / float(scale), lambda _param: True)
