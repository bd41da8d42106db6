"""Updates before ``step()``: late layers are updated and gathered while backward still runs. Opt-in.

    compute | bwd L4 | bwd L3 | bwd L2 | bwd L1 | step  |  fwd L1 | fwd L2 | fwd L3 | fwd L4 |
    comm             | RS b0  | AG b0  | RS b1  | RS b2 | RS b3 | AG b3 | AG b2 | AG b1 |
                              [1]                       [2]
    [1] b0 is reduced and at most one reduction is under way: the gap on the wire is used
    [2] those that were to be updated early and are not yet come first; how many there will be in the next step is agreed

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
of issue, on the buckets agreed for this step; ``step()`` makes up for those that did not come, before all others, which
follow nearest the input first. So every rank issues the same all-gathers in the same order, and waits for no agreement.

[Note: early updates are spread]
Where backward leaves room for a part of the gathers only, it must not be the part that is reduced first: those are the
layers that the next forward needs last, and all gathers that it needs soon would be left. Spread evenly over the model,
what is left arrives as evenly as forward uses it up. How many there is room for is learned: every rank counts what it
did, and whether it could have done one more; the smallest count becomes the next step's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from overlap.core.bucket import Bucket, Phase, Slot
from overlap.core.feature import Policy
from overlap.core.gates.holders import Strangers
from overlap.core.gathering import Transit
from overlap.core.round import Round
from overlap.core.shards import ShardUpdate
from overlap.plan.early import next_count, spread
from overlap.transport.communicator import Communicator, ReduceOp
from overlap.transport.operation import all_reduce
from overlap.transport.work import Work

__all__ = ["EarlyUpdates", "StepSkipped", "UpdatedEarly"]

_UNKNOWN = -1  # a rank's count for a step in which it handed over no gradient; it is the smallest


class UpdatedEarly(RuntimeError):
    """The script needs parameters, gradients or state of before ``step()``, which ``eager=True`` has changed."""


class StepSkipped(RuntimeError):
    """Gradients were dropped after some of them had been used already (``eager=True``)."""


class _States(Protocol):
    def replacing(self) -> AbstractContextManager[None]:
        """Around a replacement of the state that is no step."""


class EarlyUpdates(Policy):
    """The policy that updates chosen buckets before ``step()``, and keeps track of which were.

    `states` keeps its readers away meanwhile.
    """

    early = True

    def __init__(
        self,
        comm: Communicator,
        optimizer: torch.optim.Optimizer,
        round: Round,
        transit: Transit,
        states: _States,
    ) -> None:
        self._comm, self._optimizer, self._round, self._transit = comm, optimizer, round, transit
        self._states = states
        self._candidates: list[Bucket] = []
        self._chosen: list[Bucket] = []  # of this step
        self._last: Bucket | None = None
        self._shards: ShardUpdate | None = None
        self._updated: dict[Bucket, None] = {}
        self._looked = False  # whether this backward handed over a gradient, and so could tell how much room there is
        self._spare = False  # one more could have been updated
        self._learned = False  # how much room there is; until then all are tried
        self._count = torch.zeros(1, dtype=torch.int64, device="cpu")  # agreed for the next step …
        self._counted: Work | None = None  # … while forward runs
        self._used: list[dict[str, Any]] = []  # the hyper-parameters of this window's updates

    def planned(self, order: Sequence[Bucket], shards: ShardUpdate | None, reread: Iterable[Slot]) -> None:
        """Choose candidates among new buckets.

        Those with parameters in `reread`, and the last, which only ``step()`` reduces, are left to it.
        """
        late = {slot.bucket for slot in reread}
        if not self._looked:
            self._begin_step()
        self._candidates = [bucket for bucket in order[:-1] if bucket.sharded and bucket not in late]
        self._last = order[-1] if order else None
        self._shards = shards
        if not self._chosen or not set(self._chosen).issubset(self._candidates):  # else this step goes on as it began
            self._choose(len(self._candidates))
            self._learned = False

    def _choose(self, count: int) -> None:
        self._chosen = [self._candidates[place] for place in spread(len(self._candidates), count)]

    def _begin_step(self) -> None:
        """Before the first early update of a step: choose as many buckets as all ranks agreed on during forward."""
        work, self._counted = self._counted, None
        if work is not None:
            work.wait()
            possible = int(self._count)
            if possible != _UNKNOWN:
                planned, self._learned = len(self._chosen) if self._learned else 0, True
                self._choose(next_count(planned, possible, len(self._candidates)))
        self._looked = self._spare = False

    def gradient(self, bucket: Bucket) -> None:
        """A gradient of `bucket` is there: update and send the next one, if the wire has nothing better to do."""
        done = len(self._updated)
        if not self._looked:
            self._begin_step()
            self._looked = True
        if bucket is self._last or not self._round.quiet:  # the last reduction, which everybody waits for, comes next
            return
        if done and not _arrived(self._chosen[done - 1]):
            return
        if done == len(self._chosen):
            self._spare = True
            return
        chosen = self._chosen[done]
        if chosen.phase is not Phase.REDUCING or not _arrived(chosen):
            return
        if not self._updated:
            self._used = _hyper_parameters(self._optimizer)
        self._update(chosen)

    @torch.no_grad()
    def _update(self, bucket: Bucket) -> None:
        assert self._shards is not None, "candidates are updated in shards"
        self._round.settle([bucket])
        with self._states.replacing():
            bucket.adopt(Strangers())
            self._shards.step((bucket,))
        self._transit.send(bucket)
        for told in self._round.on_used:
            told((bucket,))
        self._updated[bucket] = None

    def check(self) -> None:
        """At the start of ``step()``, raise if hyper-parameters have changed since the updates before it."""
        if self._updated:
            _refuse_changes(self._used, _hyper_parameters(self._optimizer))

    def begin(self) -> Collection[Bucket]:
        """In ``step()``, on every rank: update the rest of the chosen; returns what needs no update any more."""
        if not self._candidates:
            return set()
        if not self._looked:
            self._begin_step()
        self._count[0] = len(self._updated) + self._spare if self._looked else _UNKNOWN
        for bucket in self._chosen[len(self._updated) :]:
            self._update(bucket)
        updated = set(self._updated)
        self._updated.clear()
        self._looked = False
        self._counted = self._comm.start(all_reduce(self._count, self._count, ReduceOp.MIN, label="early updates"))
        return updated

    def refuse(self, what: str) -> None:
        """Raise if the step is under way: buckets may be updated already, here or elsewhere."""
        if self._round.touched:
            raise UpdatedEarly(
                f"{what} between backward and step() cannot be had with eager=True, which updates parameters while "
                "backward runs; call it after step(), or wrap the optimizer with eager=False"
            )

    def refuse_drop(self) -> None:
        """Raise for a round with a gradient in its bucket: buckets may be updated already, here or elsewhere."""
        if self._round.filled:
            raise StepSkipped(
                "gradients were dropped after backward() and before step(), but with eager=True some parameters are "
                "updated already; call step() after every backward(), or wrap the optimizer with eager=False"
            )

    def read(self, slot: Slot) -> None:
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
