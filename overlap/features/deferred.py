"""Updates after ``step()``: each layer is updated when the next forward needs it, so reductions have longer.

    step()   │ hyper-parameters are noted; nothing is awaited
    forward  │ each layer waits, at its gate, for its own bucket's reduction, and updates it

Only for optimizers that work element by element: they may update one bucket now and another later. One of a type that we do
not know updates all inside its first ``step()``; if it writes to its groups or to itself there, or communicates, it goes on
like that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from overlap.core.bucket import Bucket, Slot
from overlap.core.feature import Policy
from overlap.core.gates.compiled import outside_compilation
from overlap.core.gathering import Transit
from overlap.core.once import named, unhooked_step, watched, writable, written
from overlap.core.round import GradientChanged, Round
from overlap.core.shards import shadow_of

__all__ = ["DeferredUpdates"]


class DeferredUpdates(Policy):
    """The policy that updates each bucket when it is needed, with the hyper-parameters of ``step()``.

    With `poison`, parameters are NaN until they are updated, so that a missed wait shows. Of an optimizer that is not
    `known` it has to be seen what else ``step()`` writes.
    """

    defers = True

    def __init__(
        self, optimizer: torch.optim.Optimizer, round: Round, transit: Transit, *, known: bool, poison: bool
    ) -> None:
        self._optimizer, self._round, self._transit, self._poison = optimizer, round, transit, poison
        self._step = unhooked_step(optimizer)
        self._known = known
        self._writes = None if not known else False  # None: not seen yet

    def arrive(self) -> None:
        self._transit.arrive_all()

    def leave(self, order: Sequence[Bucket]) -> bool:
        """Leave the update of each bucket to whoever needs it first."""
        if self._writes is not False:
            return False
        groups = [{key: _noted(value) for key, value in group.items()} for group in self._optimizer.param_groups]
        shadow = shadow_of(self._optimizer)  # as it is now; the state it writes to is the optimizer's own
        for bucket in order:
            self._leave(bucket, groups, shadow)
        return True

    def watched(self, step: Callable[..., Any]) -> Callable[..., Any]:
        return step if self._known else watched(self._optimizer, step, self._note)

    def _note(self, writes: bool) -> None:
        self._writes = bool(self._writes) or writes

    def _leave(self, bucket: Bucket, groups: list[dict[str, Any]], shadow: torch.optim.Optimizer) -> None:
        versions = {slot.index: slot.view._version for slot in bucket.slots if slot.view is not None}
        unused = {slot.index for slot in bucket.slots if slot.unused}
        for slot in bucket.slots:
            if slot.absent and not slot.unused:  # here; others used it, so `.grad` is going to be the average
                slot.param.grad = slot.view
        values: list[torch.Tensor] = []
        if self._poison:
            values = [slot.param.detach().clone() for slot in bucket.slots]
            for slot in bucket.slots:
                slot.param.data.fill_(float("nan"))

        def update(bucket: Bucket) -> None:
            for slot, value in zip(bucket.slots, values, strict=False):
                slot.param.data.copy_(value)
            for slot in bucket.slots:
                _refuse_change(slot, versions[slot.index])
            with torch.inference_mode(False), torch.no_grad():
                self._round.reduced(bucket)
            self._update(bucket, unused, groups, shadow)

        self._transit.leave(bucket, update)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _update(
        self, bucket: Bucket, unused: Collection[int], groups: list[dict[str, Any]], shadow: torch.optim.Optimizer
    ) -> None:
        kept = [slot.param.grad for slot in bucket.slots]
        chosen: dict[int, list[torch.nn.Parameter]] = {}
        for slot in bucket.slots:
            slot.param.grad = None if slot.index in unused else slot.view
            if slot.index not in unused:
                chosen.setdefault(slot.group, []).append(slot.param)
        for told in self._round.on_used:
            told((bucket,))
        if chosen:
            shadow.param_groups = [{**groups[number], "params": params} for number, params in chosen.items()]
            before = {} if self._known else writable(shadow)
            with outside_compilation():
                self._step(shadow)
            found = {} if self._known else written(before, writable(shadow))
            if found:
                raise RuntimeError(
                    f"{type(shadow).__name__}.step() wrote {named(next(iter(found)))}, which it did not in its first step: "
                    "it was called bucket by bucket, so this would count several times. Leave elementwise=True out"
                )
        for slot, gradient in zip(bucket.slots, kept, strict=True):
            if gradient is not slot.view:  # dropped after step(), or the user's own
                slot.param.grad = gradient


def _noted(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _refuse_change(slot: Slot, version: int) -> None:
    if slot.param.grad is slot.view and slot.view is not None and slot.view._version != version:
        raise GradientChanged(
            f"the gradient of {slot.name!r} was changed after step(), while its reduction was still under way; call "
            "optimizer.synchronize() after step() and before changing gradients, or optimizer.zero_grad()"
        )
