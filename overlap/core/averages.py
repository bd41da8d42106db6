"""Gives a script the averaged gradients between backward and step(), where it asks for them.

What can be done to them (clipping, a GradScaler's look) is in `overlap.features`, and done through this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from overlap.core.engine import Engine
from overlap.core.round import Stage
from overlap.transport.communicator import Communicator
from overlap.transport.memory import values_of
from overlap.transport.objects import broadcast_object
from overlap.transport.operation import all_gather, broadcast

__all__ = ["Averages"]


class Averages:
    """The averaged gradients of a round, exchanged over `comm`; see :class:`.Stage`. All methods: on every rank.

    Shards are divided among the ranks of `sharers`.
    """

    def __init__(self, engine: Engine, comm: Communicator, sharers: Communicator) -> None:
        self.engine, self.comm, self.sharers = engine, comm, sharers

    @property
    def stage(self) -> Stage:
        return self.engine.round.stage

    @property
    def whole(self) -> bool:
        """Whether every rank has, or is about to have, all averages in ``.grad``."""
        return self.engine.shards is None or self.stage is Stage.SYNCHRONIZED

    @torch.no_grad()
    def settle(self, call: str, what: str) -> None:
        """Wait for the reductions, which `call` of the script needs; shards, if there are any, hold averages then.

        Raises on every rank where the policy refuses `what` on one.
        """
        engine, round = self.engine, self.engine.round
        engine.close(call, partial(engine.policy.refuse, what))
        round.settle()
        if self.stage is Stage.LOCAL:
            for bucket in engine.order:
                if not bucket.sharded:
                    bucket.expose()
            round.advance(Stage.SETTLED)

    @torch.no_grad()
    def synchronize(self, call: str = "synchronize()", what: str = "synchronize()") -> None:
        """Make ``.grad`` the average everywhere; `call` is what the script has called. As :meth:`settle`."""
        if self.stage is Stage.SYNCHRONIZED:
            return
        engine = self.engine
        engine.close(call, partial(engine.policy.refuse, what))
        engine.round.settle()
        engine.participants.announce("synchronize")
        for bucket in engine.order:
            if bucket.sharded:
                gradients, label = bucket.gradients, f"{bucket.label} gradients"
                gradients.restore()
                self.sharers.run(all_gather(gradients.placed(), gradients.whole, counts=bucket.shares, label=label))
        for bucket in engine.order:
            bucket.expose()
        engine.round.scales.clear()  # ``.grad`` has them by now
        engine.round.advance(Stage.SYNCHRONIZED)

    def take_synchronized(self) -> None:
        """Update shards with ``.grad`` as the script left it after :meth:`synchronize`."""
        for bucket in self.engine.order:
            if bucket.sharded:
                for slot in bucket.slots:
                    slot.fill()
                    slot.unused = slot.absent
                bucket.gradients.shard.copy_(bucket.gradients.whole[bucket.own])
                if bucket.frees_gradients:
                    bucket.free_gradients()
                self.engine.sharded.take(bucket)

    @torch.no_grad()
    def share(self) -> None:
        """After :meth:`synchronize`, give ranks that have joined ``.grad`` as the others' script left it."""
        engine = self.engine
        if not engine.participants.absent:
            return
        leader = engine.participants.leader
        for bucket in engine.order:
            for slot in bucket.slots:
                slot.fill()
        unused = torch.tensor([slot.absent for slot in engine.slots], dtype=torch.uint8, device="cpu")
        self.comm.run(broadcast(unused, leader, label="unused parameters"))
        engine.round.take_unused(list(map(bool, unused.tolist())))
        for bucket in engine.order:
            self.comm.run(broadcast(bucket.gradients.whole, leader, label=f"{bucket.label} gradients"))
            bucket.expose()
        for slot in engine.slots:
            if slot.claimed:
                slot.param.grad = broadcast_object(self.comm, slot.param.grad, leader)

    # - Where they lie, once they are settled

    def pieces(self, wanted: Callable[[torch.Tensor], bool] = lambda _param: True) -> list[torch.Tensor]:
        """The averages of the `wanted` parameters in this rank's shards; no other rank has the same."""
        return self.engine.sharded.gradients(wanted)

    def alike(self, wanted: Callable[[torch.Tensor], bool] = lambda _param: True) -> Iterator[torch.nn.Parameter]:
        """The `wanted` parameters of which every rank has the whole average in ``.grad``, beside those in shards."""
        engine = self.engine
        whole = (slot.param for bucket in engine.order if not bucket.sharded for slot in bucket.slots)
        yield from filter(wanted, whole)
        yield from filter(wanted, (slot.param for slot in engine.slots if slot.claimed))

    def scaled(self, factor: float, wanted: Callable[[torch.Tensor], bool] = lambda _param: True) -> None:
        """Note that averages in shards were multiplied, so that ``.grad`` follows if something is added to it later."""
        if factor != 1:
            scales = self.engine.round.scales
            for bucket in self.engine.order:
                for slot in bucket.slots if bucket.sharded else ():
                    if wanted(slot.param):
                        scales[slot.index] = scales.get(slot.index, 1.0) * factor

    @torch.no_grad()
    def unscale(self, scale: torch.Tensor) -> None:
        """Divide the averages by a loss scale, shards where they lie.

        As a GradScaler does: times its reciprocal in fp32, computed in fp64.
        """
        inverse = scale.double().reciprocal().float()
        if self.whole:
            gradients = [slot.param.grad for slot in self.engine.slots]
        else:
            gradients = [*(param.grad for param in self.alike()), *self.pieces()]
            self.scaled(1.0 / float(scale))
        for gradient in gradients:
            if gradient is not None:
                values_of(gradient).mul_(inverse.to(gradient.device))
