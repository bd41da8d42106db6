"""One step, from the last reductions to the first all-gathers, and what may come between backward and it.

    backward │ hooks fill buckets, full ones are reduced while backward goes on
    step()   │ [1] reductions are awaited, nearest the input first   [2] the user's optimizer updates this rank's shard
             │ [3] all-gathers are issued; step() returns
    forward  │ each layer waits, at its gate, for its own bucket

[Note: nobody overtakes a step]
The last bucket in order of issue, whose gradients come at the very end of backward, is reduced by step() and not before.
As no update starts before that reduction is done, no rank can update anything before every rank has called step(). A rank
that calls state_dict() between two steps therefore finds the others' shares of the state at that same step. Where the
reductions were awaited earlier (clipping, synchronize()), step() begins with a barrier instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from overlap.bucket import Bucket, Phase
from overlap.clipping import clip_sharded
from overlap.communicator import ReduceOp
from overlap.engine import Engine
from overlap.shard_update import unhooked_step
from overlap.state_share import StateShare

__all__ = ["Stepper"]


class Stepper:
    """Steps the user's `optimizer` over the engine's buckets, shard by shard or in full on every rank."""

    def __init__(self, engine: Engine, optimizer: torch.optim.Optimizer, share: StateShare) -> None:
        self._engine, self._optimizer, self._share = engine, optimizer, share
        self._comm = engine.comm
        self._synchronized = False  # .grad holds averages: step() uses them as they are

    def step(self, closure: Callable[[], Any] | None) -> Any:
        """See :meth:`overlap.optimizer.DistributedOptimizer.step`."""
        if self._engine.shards is None:
            return self._step_whole(closure)
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self._step_shards()
        return result

    def forget(self) -> None:
        """The gradients since the last step are dropped: complete what is in flight."""
        if self._engine.window.touched:
            self._engine.window.discard()
            self._synchronized = False

    def _prepare(self) -> None:
        if not self._synchronized:
            self._engine.prepare()

    def _close_window(self) -> None:
        self._engine.window.reset()
        self._synchronized = False

    @torch.no_grad()
    def _step_shards(self) -> None:
        engine, window = self._engine, self._engine.window
        self._prepare()
        if window.reduced:
            self._comm.barrier(label="step")  # [Note: nobody overtakes a step]
        if self._synchronized:
            self._take_synchronized()
        window.settle(engine.order[-1:])  # before anything is updated: [Note: nobody overtakes a step]
        with self._share.updating():
            whole = []
            for bucket in reversed(engine.order):
                window.settle([bucket])
                if bucket.holds_parameters:
                    bucket.adopt()
                    engine.sharded.step(bucket)
                    engine.transit.send(bucket)
                else:
                    whole.append(bucket)
            if whole:
                self._update_whole(whole)
            self._close_window()

    def _update_whole(self, buckets: list[Bucket]) -> None:
        """Update the parameters that cannot be sliced, on every rank alike, beside sharded ones."""
        if not self._synchronized:
            self._engine.expose(buckets)
        members = {id(slot.param) for bucket in buckets for slot in bucket.slots}
        groups = self._optimizer.param_groups
        saved = [group["params"] for group in groups]
        try:
            for group in groups:
                group["params"] = [param for param in group["params"] if id(param) in members]
            unhooked_step(self._optimizer)(self._optimizer)
        finally:
            for group, params in zip(groups, saved, strict=True):
                group["params"] = params
        for bucket in buckets:
            bucket.advance(Phase.FILLING)

    def _step_whole(self, closure: Callable[[], Any] | None) -> Any:
        step = unhooked_step(self._optimizer)
        if closure is None:
            self._reduce_whole()
            with self._share.updating():
                result = step(self._optimizer)
        else:

            def evaluate() -> Any:
                with torch.enable_grad():
                    loss = closure()
                self._reduce_whole()
                return self._average(loss)

            with self._share.updating():
                result = step(self._optimizer, evaluate)
        return result

    def _reduce_whole(self) -> None:
        self._prepare()
        engine = self._engine
        if not self._synchronized:
            engine.window.settle()
            engine.expose(engine.order)
        for bucket in engine.order:
            bucket.advance(Phase.FILLING)
        self._close_window()

    def _average(self, loss: Any) -> Any:
        plain = loss.detach() if isinstance(loss, torch.Tensor) else torch.tensor(float(loss), dtype=torch.float64)
        mean = plain.clone().contiguous()
        self._comm.all_reduce(mean, mean, ReduceOp.AVG, label="loss")
        return mean if isinstance(loss, torch.Tensor) else float(mean)

    # - Between backward and step, and after step

    @torch.no_grad()
    def synchronize(self) -> None:
        """See :meth:`overlap.optimizer.DistributedOptimizer.synchronize`."""
        engine, window = self._engine, self._engine.window
        engine.transit.arrive_all()
        if self._synchronized or not window.touched:
            return
        engine.prepare()
        window.settle()
        window.reduced = True
        for bucket in engine.order:
            if bucket.holds_parameters:
                label = f"{bucket.label} gradients"
                self._comm.all_gather(bucket.reduced, bucket.gradients, counts=bucket.shares, label=label)
                engine.find_unused(bucket)
        engine.expose(engine.order)
        self._synchronized = True

    def _take_synchronized(self) -> None:
        """``.grad``, as the user left it after :meth:`synchronize`, is what shards are updated with."""
        for bucket in self._engine.order:
            if bucket.holds_parameters:
                for slot in bucket.slots:
                    slot.fill()
                bucket.reduced.copy_(bucket.gradients[bucket.own])
                self._engine.sharded.take(bucket)

    @torch.no_grad()
    def clip(
        self, wanted: Callable[[torch.Tensor], bool], max_norm: float, norm_type: float, error_if_nonfinite: bool
    ) -> torch.Tensor:
        """Clip the averaged gradients of the `wanted` parameters by their total norm. On every rank."""
        engine = self._engine
        if engine.shards is None or self._synchronized:  # whole averages on every rank: torch's own clipping
            self.synchronize()
            params = [slot.param for slot in engine.slots if wanted(slot.param)]
            return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite)
        engine.prepare()
        engine.window.settle()
        whole = [bucket for bucket in engine.order if not bucket.holds_parameters]
        if not engine.window.reduced:
            engine.expose(whole)
        engine.window.reduced = True
        members = [slot.param for bucket in whole for slot in bucket.slots]
        alike = [param.grad for param in members if param.grad is not None and wanted(param)]
        pieces = engine.shards.gradients(wanted)
        return clip_sharded(self._comm, pieces, alike, max_norm, norm_type, error_if_nonfinite)
