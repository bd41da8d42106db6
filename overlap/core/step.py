"""One step, from the last reductions to the first all-gathers.

    backward │ hooks fill buckets, full ones are reduced while backward goes on
    step()   │ [1] reductions are awaited, nearest the input first   [2] the user's optimizer updates this rank's shard
             │ [3] all-gathers are issued; step() returns
    forward  │ each layer waits, at its gate, for its own bucket

[Note: nobody overtakes a step]
step() begins with a tally (`overlap.core.closing`), to which every rank has come before anything is updated. A rank that
calls state_dict() between two steps therefore finds the others' shares of the state at that same step. With early updates
(`overlap.features.early`) a rank that calls state_dict() has no gradient since its last step, or it raises: so none of its
reductions is issued, no other rank's can be done, and nobody has updated anything beyond that step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from operator import attrgetter
from typing import Any

import torch

from overlap.core.bucket import Bucket, Phase
from overlap.core.engine import Engine
from overlap.core.gates import listed
from overlap.core.owners import Strangers
from overlap.core.shards import unhooked_step
from overlap.core.window import TooManyGradients
from overlap.features.averages import Averages
from overlap.state.share import StateShare
from overlap.transport.communicator import ReduceOp
from overlap.transport.encoding import can_travel

__all__ = ["Stepper", "hyper_parameters"]

_sparse = attrgetter("sparse")


class Stepper:
    """Steps the user's `optimizer` over the engine's buckets, shard by shard or in full on every rank."""

    def __init__(
        self,
        engine: Engine,
        averages: Averages,
        optimizer: torch.optim.Optimizer,
        share: StateShare,
        *,
        by_loss: bool,
    ) -> None:
        """`by_loss`: the optimizer may look at what a closure returns, and call it again."""
        self._engine, self._averages, self._optimizer, self._share = engine, averages, optimizer, share
        self._comm, self._by_loss = engine.comm, by_loss

    def step(
        self,
        closure: Callable[[], Any] | None,
        scale: torch.Tensor | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> Any:
        """See :meth:`overlap.optimizer.distributed.DistributedOptimizer.step`; divide gradients by `scale` first.

        What `check()` raises on one rank, before gradients are used, makes all ranks raise.
        """
        self._check = check
        self._engine.wrapped.follow(in_parts=self._engine.shards is not None or self._engine.deferred is not None)
        if closure is not None and self._engine.shards is None and self._by_loss:
            return self._step_deciding(closure)
        result = None
        if closure is not None:
            self._refuse_earlier_gradients()
            with torch.enable_grad():
                result = closure()
        if self._engine.shards is not None:
            self._step_shards(scale)
            return result
        updated = self._step_whole(scale)
        return updated if closure is None else result

    @torch.no_grad()
    def finish(self, given_up: Collection[str]) -> None:
        """Training ends: what is in flight arrives. After a backward without a step, early updates end alike everywhere.

        Not where only some ranks ran it: their reductions, on one of the communicators `given_up`, never end.
        """
        engine = self._engine
        if engine.eager is not None and engine.open_step:
            if engine.travels_on(given_up):
                return
            engine.close("shutdown()")
            engine.eager.finish()
        engine.transit.arrive_all()

    def _close(self) -> None:
        """Before anything is updated. Ranks agree here also where they did so earlier, for clipping, say: some may have
        dropped the gradients since. Joined ranks are called for that by those who step."""
        engine = self._engine
        engine.close("step()", self._may_step, again=not engine.attendance.following)

    def _may_step(self) -> None:
        if self._engine.eager is not None:
            self._engine.eager.check()
        self._check()

    def _end_round(self) -> None:
        self._engine.closing.end_step()
        self._engine.accumulating = False

    def _announce(self, scale: torch.Tensor | None) -> None:
        """Joined ranks own shards, too: they step with the hyper-parameters in force where training goes on."""
        if self._engine.attendance.absent:
            self._engine.attendance.announce("step", groups=hyper_parameters(self._optimizer), scale=scale)

    @torch.no_grad()
    def _step_shards(self, scale: torch.Tensor | None) -> None:
        engine, window, averages = self._engine, self._engine.window, self._averages
        self._close()  # before anything is updated: [Note: nobody overtakes a step]
        self._announce(scale)
        if scale is not None:
            averages.unscale(scale)
        if averages.synchronized:
            averages.share()
            averages.take_synchronized()
        with self._share.updating():
            whole, strangers, shards = [], Strangers(), engine.sharded
            early = set() if engine.eager is None else engine.eager.finish()
            for bucket in reversed(engine.order):
                if bucket in early:
                    continue
                if bucket.phase is Phase.REDUCING:
                    window.settle([bucket])
                if bucket.holds_parameters:
                    bucket.adopt(strangers)
                    shards.step(bucket)
                    engine.transit.send(bucket)
                else:
                    whole.append(bucket)
            if whole or any(map(_sparse, engine.slots)):
                self._update_whole(whole)
            self._end_round()

    def _update_whole(self, buckets: list[Bucket]) -> None:
        """Update the parameters that cannot be sliced, on every rank alike, beside sharded ones."""
        if not self._averages.synchronized:
            for bucket in buckets:
                bucket.expose()
        members = {id(slot.param) for bucket in buckets for slot in bucket.slots}
        members |= {id(slot.param) for slot in self._engine.slots if slot.sparse}
        groups = self._optimizer.param_groups
        saved = [group["params"] for group in groups]
        try:
            for group in groups:
                group["params"] = [param for param in listed(group["params"]) if id(param) in members]
            unhooked_step(self._optimizer)(self._optimizer)
        finally:
            for group, params in zip(groups, saved, strict=True):
                group["params"] = params
        for bucket in buckets:
            bucket.advance(Phase.FILLING)

    def _step_whole(self, scale: torch.Tensor | None) -> Any:
        self._close()
        if scale is None and self._leave():
            return None
        self._settle_whole()
        self._announce(scale)
        self._take_whole(scale)
        with self._share.updating():
            return unhooked_step(self._optimizer)(self._optimizer)

    def _step_deciding(self, closure: Callable[[], Any]) -> Any:
        """The optimizer evaluates as often as it likes, and is given the averaged loss: all ranks decide alike."""
        engine, step = self._engine, unhooked_step(self._optimizer)
        first = True
        # The optimizer may use gradients from before it calls the closure.
        if self._any_rank(engine.accumulating or any(slot.fires for slot in engine.slots)):
            self._averages.synchronize()

        def evaluate() -> Any:
            nonlocal first
            with torch.enable_grad():
                loss = closure()
            self._averages.close("step(closure)")
            self._settle_whole()
            attendance = engine.attendance
            if first and attendance.absent:  # whose steps will evaluate as often as this one
                groups = hyper_parameters(self._optimizer)
                like = torch.zeros_like(loss) if isinstance(loss, torch.Tensor) else None
                attendance.announce("closure", groups=groups, loss=like)
            first = False
            factor = attendance.factor(attendance.round)
            self._take_whole()
            return self._average(loss, factor)

        with self._share.updating():
            return step(self._optimizer, evaluate)

    def _any_rank(self, mine: bool) -> bool:
        """Whether any rank says so before it evaluates a closure. Who has joined is called for that by those who do."""
        return not self._engine.attendance.following and self._engine.closing.ask(mine, "step(closure)")

    def _refuse_earlier_gradients(self) -> None:
        """On every rank, where one has a gradient on its way that the closure's would be added to."""
        if self._any_rank(self._engine.window.filled):
            raise TooManyGradients(
                "step(closure) computes gradients, and on some rank there were some already since the last step(): call "
                "zero_grad() before it, on every rank, or step() without a closure"
            )

    def _leave(self) -> bool:
        """Leave the updates to the next forward, if the strategy does that and nothing was done to the gradients yet."""
        engine, averages = self._engine, self._averages
        if engine.deferred is None or averages.synchronized or averages.infinities_shown or engine.window.reduced:
            return False
        if any(slot.sparse for slot in engine.slots):
            return False
        engine.attendance.leave(groups=hyper_parameters(self._optimizer), scale=None)
        engine.deferred.leave(engine.order)
        self._end_round()
        return True

    def _settle_whole(self) -> None:
        engine = self._engine
        if not self._averages.synchronized:
            engine.window.settle()
            for bucket in engine.order:
                bucket.expose()

    def _take_whole(self, scale: torch.Tensor | None = None) -> None:
        engine = self._engine
        if self._averages.synchronized:
            self._averages.share()
        if scale is not None:
            self._averages.unscale(scale)
        for bucket in engine.order:
            bucket.advance(Phase.FILLING)
        self._end_round()

    def _average(self, loss: Any, factor: float) -> Any:
        plain = (
            loss.detach()
            if isinstance(loss, torch.Tensor)
            else torch.tensor(float(loss), dtype=torch.float64, device="cpu")
        )
        mean = plain.clone().contiguous()
        self._comm.all_reduce(mean, mean, ReduceOp.AVG, label="loss")
        if factor != 1:
            mean *= factor
        return mean if isinstance(loss, torch.Tensor) else float(mean)


def hyper_parameters(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Of each group, as they are now, to be sent: a function in a group stays with its rank."""
    return [
        {
            key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in group.items()
            if key != "params" and (isinstance(value, torch.Tensor) or can_travel(value))
        }
        for group in optimizer.param_groups
    ]
