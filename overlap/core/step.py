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

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch

from overlap.core.averages import Averages
from overlap.core.bucket import Bucket, Phase
from overlap.core.engine import Engine
from overlap.core.feature import StatePlacement
from overlap.core.gates.gates import listed
from overlap.core.gates.holders import Strangers
from overlap.core.once import Once, unhooked_step
from overlap.core.round import Stage, TooManyGradients
from overlap.transport.cuda import streams
from overlap.transport.encoding import can_travel
from overlap.transport.objects import allgather_object

__all__ = ["Closure", "Stepper", "calls", "hyper_parameters", "take_hyper_parameters"]

Closure = Callable[[], Any]
Skips = Callable[[Sequence[Bucket], int], bool]

_claimed = attrgetter("claimed")


class Stepper:
    """Steps the user's `optimizer` over the engine's buckets, shard by shard or in full on every rank.

    `by_loss` steps an optimizer that may look at what a closure returns, and call it again. `skips` decides, on all ranks
    alike and when all reductions were awaited, whether a step is left out, by its buckets and its number.
    """

    def __init__(
        self,
        engine: Engine,
        averages: Averages,
        optimizer: torch.optim.Optimizer,
        states: StatePlacement,
        by_loss: Callable[[Stepper, Closure], Any] | None = None,
        skips: Skips | None = None,
    ) -> None:
        self.engine, self.averages, self.optimizer = engine, averages, optimizer
        self.updating, self._by_loss, self._skips = states.updating, by_loss, skips
        self.update = engine.policy.watched(unhooked_step(optimizer))

    def updates_by(self, update: Callable[[torch.optim.Optimizer], Any]) -> None:
        """Have `update` do what the user's optimizer would, wherever every rank updates whole parameters."""
        self.update = update

    @property
    def decides_by_loss(self) -> bool:
        """Whether a closure may be evaluated several times."""
        return self._by_loss is not None and self.engine.shards is None

    def step(
        self,
        closure: Closure | None,
        scale: torch.Tensor | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> Any:
        """Make a step, as :meth:`overlap.optimizer.distributed.DistributedOptimizer.step`.

        Gradients are divided by `scale` first.

        What `check()` raises on one rank, before gradients are used, makes all ranks raise.
        """
        self._check = check
        sharded = self.engine.shards is not None
        if closure is not None and self._by_loss is not None and not sharded:
            if self._skips is not None:
                raise ValueError(
                    f"on_nonfinite='skip' leaves out whole steps, and {type(self.optimizer).__name__} may evaluate a "
                    "closure several times in one: use 'raise' or 'ignore'"
                )
            return self._by_loss(self, closure)
        result = None
        if closure is not None:
            self._refuse_earlier_gradients()
            with torch.enable_grad():
                result = closure()
        if sharded:
            self._step_shards(scale)
            return result
        updated = self._step_whole(scale)
        return updated if closure is None else result

    def _close(self) -> None:
        """Before anything is updated: [Note: nobody overtakes a step]. Ranks agree here also where they did so earlier, for
        clipping, say: some may have dropped the gradients since. Joined ranks are called for that by those who step."""
        engine = self.engine
        engine.close("step()", self._may_step, again=not engine.participants.following, steps=True)

    def _may_step(self) -> None:
        self.engine.policy.check()
        self._check()

    def _end_round(self) -> None:
        self.engine.closing.end_step()
        self.engine.accumulating = False

    def _announce(self, scale: torch.Tensor | None) -> None:
        """Joined ranks own shards, too: they step with the hyper-parameters in force where training goes on."""
        if self.engine.participants.absent:
            self.engine.participants.announce("step", groups=hyper_parameters(self.optimizer), scale=scale)

    @torch.no_grad()
    def _step_shards(self, scale: torch.Tensor | None) -> None:
        engine, round, averages = self.engine, self.engine.round, self.averages
        self._close()
        self._announce(scale)
        if scale is not None:
            averages.unscale(scale)
        if round.stage is Stage.SYNCHRONIZED:
            averages.share()
            averages.take_synchronized()
        if self._skips is not None and scale is None and self._left_out(self._skips):
            return
        with self.updating():
            whole: list[Bucket] = []
            strangers, shards, transit = Strangers(), engine.sharded, engine.transit
            on_used = round.on_used if scale is None else ()
            updated = engine.policy.begin()
            left = [bucket for bucket in reversed(engine.order) if bucket not in updated]
            for together in calls(left, bool(left) and streams.on_device(left[0].gradients.shard)):
                for bucket in together:
                    if bucket.phase is Phase.REDUCING:
                        round.reduced(bucket)
                        bucket.advance(Phase.REDUCED)
                    if bucket.sharded:
                        bucket.adopt(strangers)
                if not together[0].sharded:
                    whole.extend(together)
                    continue
                shards.step(together)
                for bucket in together:
                    transit.send(bucket)
                    for told in on_used:  # while this is in the processor's cache, and others wait for nothing
                        told((bucket,))
            if whole or any(map(_claimed, engine.slots)):
                self._update_whole(whole)
                for told in on_used:
                    told(whole)
            if engine.unsharder.active:
                engine.unsharder.updated(engine.participants, round.passes)
            self._end_round()
            if shards.once is not None:
                self._settle(shards.once)
        if transit.held:
            transit.arrive_held()

    def _settle(self, once: Once) -> None:
        """The step that was made in parts is over. What went wrong in the first one is raised on every rank."""
        failure = once.settle(lambda mine: allgather_object(self.averages.comm, mine))
        if failure:
            self.engine.closing.ended = failure
            raise RuntimeError(failure)

    def _left_out(self, skips: Skips) -> bool:
        """Whether this step is, as all ranks agree. Its gradients are dropped then."""
        engine = self.engine
        engine.round.settle()
        if not skips(engine.order, engine.participants.round):
            return False
        engine.closing.drop_everywhere()
        engine.accumulating = False
        return True

    def _update_whole(self, buckets: list[Bucket]) -> None:
        """Update the parameters that cannot be sliced, on every rank alike, beside sharded ones."""
        if self.averages.stage is not Stage.SYNCHRONIZED:
            for bucket in buckets:
                bucket.expose()
        members = {id(slot.param) for bucket in buckets for slot in bucket.slots}
        members |= {id(slot.param) for slot in self.engine.slots if slot.claimed}
        groups, once = self.optimizer.param_groups, self.engine.sharded.once
        chosen = [[param for param in listed(group["params"]) if id(param) in members] for group in groups]
        if once is not None:
            once.part(self.optimizer.state, dict(enumerate(chosen)))
        else:
            self._update_some(chosen)
        for bucket in buckets:
            bucket.advance(Phase.FILLING)

    def _update_some(self, chosen: Sequence[list[torch.nn.Parameter]]) -> None:
        groups = self.optimizer.param_groups
        saved = [group["params"] for group in groups]
        try:
            for group, params in zip(groups, chosen, strict=True):
                group["params"] = params
            self.update(self.optimizer)
        finally:
            for group, params in zip(groups, saved, strict=True):
                group["params"] = params

    def _step_whole(self, scale: torch.Tensor | None) -> Any:
        self._close()
        if scale is None and self._skips is None and self._leave():
            return None
        self.settle_whole()
        self._announce(scale)
        if self._skips is not None and scale is None and self._left_out(self._skips):
            return None
        self.take_whole(scale)
        with self.updating():
            return self.update(self.optimizer)

    def _leave(self) -> bool:
        """Leave the updates to the next forward, if the policy does that and nothing was done to the gradients yet."""
        engine = self.engine
        if engine.round.stage is not Stage.LOCAL or any(map(_claimed, engine.slots)):
            return False
        if not engine.policy.leave(engine.order):
            return False
        engine.participants.leave(groups=hyper_parameters(self.optimizer), scale=None)
        self._end_round()
        if engine.transit.held:
            engine.transit.arrive_held()
        return True

    def settle_whole(self) -> None:
        """Put the averages of the round, which is closed, into ``.grad``."""
        engine = self.engine
        if engine.round.stage is not Stage.SYNCHRONIZED:
            engine.round.settle()
            for bucket in engine.order:
                bucket.expose()

    def take_whole(self, scale: torch.Tensor | None = None) -> None:
        """End the round: the averages are about to be used."""
        engine = self.engine
        if engine.round.stage is Stage.SYNCHRONIZED:
            self.averages.share()
        if scale is not None:
            self.averages.unscale(scale)
        else:
            for told in engine.round.on_used:
                told(engine.order)
        for bucket in engine.order:
            bucket.advance(Phase.FILLING)
        self._end_round()

    def any_rank(self, mine: bool) -> bool:
        """Whether any rank's `mine` is true, asked before a closure is evaluated.

        Who has joined is called for that by those who do.
        """
        return not self.engine.participants.following and self.engine.closing.ask(mine, "step(closure)")

    def _refuse_earlier_gradients(self) -> None:
        """On every rank, where one has a gradient on its way that the closure's would be added to."""
        if self.any_rank(self.engine.round.filled):
            raise TooManyGradients(
                "step(closure) computes gradients, and on some rank there were some already since the last step(): call "
                "zero_grad() before it, on every rank, or step() without a closure"
            )


def calls(buckets: Sequence[Bucket], launched: bool) -> Sequence[Sequence[Bucket]]:
    """Which `buckets`, in the order of their use, the optimizer updates in one call.

    One at a time on the host, so that its gather leaves before the next is computed. Where a device computes and the host
    has `launched` it only, one, two, four, …: the first gathers leave early, and thirty buckets take five calls. What is
    updated in full comes by itself.
    """
    if not launched:
        return [(bucket,) for bucket in buckets]
    found: list[list[Bucket]] = []
    for bucket in buckets:
        last = found[-1] if found else []
        kind = bool(last) and last[0].sharded is bucket.sharded
        if kind and len(last) < 2 ** (len(found) - 1):
            last.append(bucket)
        else:
            found.append([bucket])
    return found


def hyper_parameters(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The hyper-parameters of each group, to be sent; a function in a group stays with its rank."""
    return [
        {
            key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in group.items()
            if key != "params" and (isinstance(value, torch.Tensor) or can_travel(value))
        }
        for group in optimizer.param_groups
    ]


def take_hyper_parameters(optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Set the hyper-parameters that :func:`hyper_parameters` gave on another rank."""
    for group, values in zip(optimizer.param_groups, groups, strict=True):
        for key, value in values.items():
            mine = group.get(key)
            if isinstance(mine, torch.Tensor) and isinstance(value, torch.Tensor):
                mine.copy_(value)  # a scheduler may hold it
            else:
                group[key] = value
