"""Updates before ``step()``: late layers are updated and gathered while backward still runs. Opt-in.

    compute | bwd L4 | bwd L3 | bwd L2 | bwd L1 | step  |  fwd L1 | fwd L2 | fwd L3 | fwd L4 |
    comm             | RS b0  | AG b0  | RS b1  | RS b2 | RS b3 | AG b3 | AG b2 | AG b1 |
                              [1]                       [2]
    [1] b0 is reduced and at most one reduction is under way: the gap on the wire is used
    [2] who still has to be updated is agreed

[Note: a parameter is updated early only when this backward cannot read it any more]
A bucket is updated once every parameter in it got its last gradient. Autograd runs a parameter's accumulation after all
nodes that have an edge to it, so every use of the parameter in the graph, tied and repeated ones too, is behind us; how
often it accumulates in one backward (reentrant checkpoints) was learned in the first iteration. What is left are reads
outside the graph. Recomputation (checkpoints) reads through the modules' gates: parameters that were read there after
their last gradient in the first iteration are never updated early, and a read of an updated parameter before ``step()``
raises. A detached parameter that some node saved shares its version counter, so autograd itself raises when it finds the
parameter updated. Parameters that no gate guards are never updated early. A value taken through ``.data`` and read in
backward cannot be seen by anybody.

[Note: the gap on the wire]
With two reductions under way the second waits for the wire, and a gather would delay both. One alone says little: on a
rank that is ahead of the others it waits for them, at every gradient, and nobody would ever gather if that counted.

[Note: early updates keep the order of all-gathers]
When a reduction is done is this rank's own experience, so it must not decide an order. Early updates happen in the order
of issue and their all-gathers travel on a channel of their own; ranks differ only in how far they came. ``step()``
agrees on the largest number; everybody catches up to it, and the rest follows, nearest the input first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from overlap.bucket import Bucket, Phase, Slot
from overlap.communicator import Communicator, ReduceOp
from overlap.shard_update import ShardUpdate
from overlap.transit import Transit
from overlap.window import GradientWindow

__all__ = ["EagerUpdates", "UpdatedEarly"]


class UpdatedEarly(RuntimeError):
    """Something needs the parameters, gradients or state from before ``step()``; ``eager=True`` has changed them."""


class EagerUpdates:
    """How far early updates came since the last step. `locked` keeps the state's readers out meanwhile."""

    def __init__(
        self, comm: Communicator, optimizer: torch.optim.Optimizer, window: GradientWindow, transit: Transit
    ) -> None:
        self._comm, self._optimizer, self._window, self._transit = comm, optimizer, window, transit
        self.locked: Callable[[], AbstractContextManager[None]] = nullcontext
        self._candidates: list[Bucket] = []
        self._shards: ShardUpdate | None = None
        self._updated: dict[Bucket, None] = {}
        self._used: list[dict[str, Any]] = []  # the hyper-parameters of this window's updates

    def follow(self, order: Sequence[Bucket], shards: ShardUpdate | None, reread: Iterable[Slot]) -> None:
        """New buckets. Those with parameters in `reread`, and the last, which only ``step()`` reduces, are left to it."""
        late = {slot.bucket for slot in reread}
        self._candidates = [bucket for bucket in order[:-1] if bucket.holds_parameters and bucket not in late]
        self._shards = shards

    def poll(self) -> None:
        """From the gradient hooks: update and send the next bucket if the wire has nothing better to do."""
        done = len(self._updated)
        if done == len(self._candidates) or not self._window.quiet:
            return
        bucket = self._candidates[done]
        if bucket.phase is not Phase.REDUCING or not _arrived(bucket):
            return
        if done and not _arrived(self._candidates[done - 1]):
            return
        if not self._updated:
            self._used = _hyper_parameters(self._optimizer)
        self._update(bucket)

    @torch.no_grad()
    def _update(self, bucket: Bucket) -> None:
        assert self._shards is not None, "candidates are updated in shards"
        self._window.settle([bucket])
        with self.locked():
            bucket.adopt()
            self._shards.step(bucket)
        self._transit.send(bucket)
        self._updated[bucket] = None

    def check(self) -> None:
        """At the start of ``step()``: the hyper-parameters are those of the updates before it, or we raise."""
        if self._updated:
            _refuse_changes(self._used, _hyper_parameters(self._optimizer))

    def finish(self) -> set[Bucket]:
        """In ``step()``, on every rank: catch up with whoever came furthest; returns what needs no update any more."""
        if not self._candidates:
            return set()
        furthest = torch.tensor([len(self._updated)])
        self._comm.all_reduce(furthest, furthest, ReduceOp.MAX, label="early updates")
        for bucket in self._candidates[len(self._updated) : int(furthest)]:
            self._update(bucket)
        updated = set(self._updated)
        self._updated.clear()
        return updated

    def refuse(self, what: str) -> None:
        """Raise if the step is under way: a gradient arrived, here or elsewhere buckets may be updated already."""
        if self._window.touched:
            raise UpdatedEarly(
                f"{what} between backward and step() cannot be had with eager=True, which updates parameters while "
                "backward runs; call it after step(), or wrap the optimizer with eager=False"
            )

    def refuse_read(self, slot: Slot) -> None:
        """A parameter is about to be handed out."""
        if slot.bucket in self._updated:
            raise UpdatedEarly(
                f"parameter {slot.name!r} was read before step() and after eager=True had updated it; read it after "
                "step(), or wrap the optimizer with eager=False (a checkpoint that recomputed it only now, and not in "
                "the first iteration, needs that)"
            )


def _arrived(bucket: Bucket) -> bool:
    return bucket.work is None or bucket.work.done()


def _hyper_parameters(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {key: _snapshot(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]


def _snapshot(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _refuse_changes(used: list[dict[str, Any]], now: list[dict[str, Any]]) -> None:
    for number, (before, after) in enumerate(zip(used, now, strict=False)):
        for key, value in before.items():
            if after.get(key) != value:
                raise UpdatedEarly(
                    f"{key!r} of parameter group {number} was {value!r} when eager=True updated parameters during "
                    f"backward and is {after.get(key)!r} at step(); change hyper-parameters after step() or before "
                    "backward()"
                )
