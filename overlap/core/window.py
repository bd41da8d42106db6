"""From the first gradient after a step to the next step: which gradients are there, what is in flight.

backward:   grad_ready … grad_ready ─▶ bucket full ─▶ launch, in bucket order, the same on all ranks
step():     verify ─▶ flush (what did not fill) ─▶ settle each bucket ─▶ update ─▶ reset
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter

import torch

from overlap.core.bucket import Bucket, Phase, Slot
from overlap.transport.forks import Origin
from overlap.transport.work import arrive

__all__ = ["GradientChanged", "GradientWindow", "StepSkipped", "TooManyGradients"]


_fires, _filled, _meets = attrgetter("fires"), attrgetter("filled"), attrgetter("meets")
_UNREADABLE = (Phase.GATHERING, Phase.DUE)
_ISSUED_PHASES = (Phase.REDUCING, Phase.REDUCED)
_ISSUED = "its reduction had been issued; the change would be lost"


class TooManyGradients(RuntimeError):
    """More backward passes than announced ran before ``step()``."""


class GradientChanged(RuntimeError):
    """A gradient was changed after backward on this rank, where the average over ranks should have been."""


class StepSkipped(RuntimeError):
    """Gradients were dropped after some of them had been used already (``eager=True``)."""


class GradientWindow:
    """Readiness of every slot and bucket. `launch(bucket)` issues its reduction; `settle(bucket)` awaits the work.

    `arrive()` frees the buffers of updates that were left for after ``step()``. `order` is the agreed order of issue. With
    `hold_last` its last bucket is issued by :meth:`flush` only. Where buckets are updated before ``step()``, a step cannot
    be skipped: not `skippable`. Where the strategy sees to one order on all ranks, buckets are launched as they fill: not
    `ordered`. Whoever agrees with other ranks on what becomes of the gradients sets :attr:`hold`, which says at the first
    gradient whether all of this backward waits for the call that closes the round, and :attr:`drop_unseen`, which drops
    what was dropped without a word.
    """

    def __init__(
        self,
        slots: list[Slot],
        order: list[Bucket],
        *,
        passes: int,
        hold_last: bool,
        skippable: bool = True,
        ordered: bool = True,
        launch: Callable[[Bucket], None],
        settle: Callable[[Bucket], None],
        arrive: Callable[[], None],
    ) -> None:
        self.slots, self.order, self.passes = slots, order, passes
        self._hold_last, self._skippable, self._ordered = hold_last, skippable, ordered
        self._launch, self._settle, self._arrive = launch, settle, arrive
        self._next, self._origin = 0, Origin()
        self.reduced = False  # all reductions of this window were awaited, by clipping or synchronize()
        self.synchronized = False  # .grad holds averages: step() uses them as they are
        self.infinities_shown = False  # a GradScaler wrote to .grad, which no longer counts
        self.scales: dict[int, float] = {}  # by slot: what averages in shards were multiplied by, and `.grad` was not
        self.unscaled: dict[int, float] = {}  # … in the round before
        self.hold: Callable[[], bool] = lambda: False
        self.drop_unseen: Callable[[], None] = lambda: None
        self.begun = False  # a gradient arrived …
        self.held = False  # … and all of this backward's wait for the call that closes the round
        self.dropped = False  # reductions of a round that was dropped are on their way, in all buckets

    @property
    def touched(self) -> bool:
        """Whether a gradient arrived since the last step."""
        return any(map(_fires, self.slots)) or any(map(_filled, self.slots))

    @property
    def issued(self) -> bool:
        """Whether every reduction of this window is issued."""
        return bool(self.order) and not self.dropped and all(bucket.phase in _ISSUED_PHASES for bucket in self.order)

    @property
    def sent(self) -> bool:
        """Whether a reduction of this window is issued."""
        return not self.dropped and any(bucket.phase in _ISSUED_PHASES for bucket in self.order)

    @property
    def quiet(self) -> bool:
        """Whether at most one reduction is under way: the second would wait for the wire, one may wait for a late rank."""
        before_last = self.order[self._next - 2] if self._next > 1 else None
        if before_last is None or before_last.work is None or before_last.phase is not Phase.REDUCING:
            return True
        return before_last.work.done()

    @property
    def filled(self) -> bool:
        """Whether a gradient of this window is in its bucket, and reductions may be under way."""
        return any(map(_filled, self.slots))

    def grad_ready(self, slot: Slot) -> None:
        """A gradient was accumulated into ``slot.param.grad``."""
        if not self.begun:
            self.begun, self.held = True, self.hold()
        if slot.filled:
            self._restart_or_refuse(slot)
        slot.fires += 1
        if not self.held and slot.fires < slot.expected * self.passes:
            slot.note()
            return
        bucket = slot.bucket
        assert bucket is not None
        if bucket.phase in _UNREADABLE:
            self._origin.require()
            raise RuntimeError(
                f"a gradient for parameter {slot.name!r} arrived although no module handed the parameter out since "
                "step(), so an old value may have been used; call optimizer.synchronize() after step() before using "
                "parameters that you hold outside their modules"
            )
        if self.held:
            slot.note()
            return
        slot.fill()
        if not all(map(_filled, reversed(bucket.slots))):  # as _full(), which this is too often to call
            return
        if bucket.gradient_check is not None:
            bucket.gradient_check.close()
        if self._ordered:
            self._launch_full(held_back=1 if self._hold_last else 0)
        else:
            self._launch_filled([bucket])

    def note(self, slot: Slot) -> None:
        """A gradient was accumulated of a slot that is in no bucket."""
        if not self.begun:
            self.begun, self.held = True, self.hold()
        slot.fires += 1
        slot.note()

    def accumulate(self, slot: Slot) -> None:
        """A gradient was accumulated inside ``no_sync()``."""
        if not slot.filled:
            slot.note()

    def _restart_or_refuse(self, slot: Slot) -> None:
        if slot.param.grad is slot.view:
            raise TooManyGradients(
                f"the gradient of {slot.name!r} was computed again before step() (backward_passes_per_step="
                f"{self.passes}, {slot.expected} accumulation(s) per pass): call optimizer.step() or "
                "optimizer.zero_grad() between backward passes, or accumulate with backward_passes_per_step or no_sync()"
            )
        # The gradients of the last window were dropped (p.grad = None) and its step skipped. Slots that still have
        # theirs were filled by this new backward before anybody could notice: they wait, as all that follow do.
        kept = [(other, other.fires) for other in self.slots if other.filled and not (other.dropped or other.absent)]
        for other, _ in kept:
            assert other.bucket is not None
            if other.bucket.phase is not Phase.FILLING and not other.bucket.holds_parameters:
                raise GradientChanged(
                    f"gradients were dropped by hand after backward(), and the next one of {other.name!r} was sent with "
                    "what was left of them; call optimizer.zero_grad() to skip a step"
                )
            other.take_out()
        self.drop_unseen()
        for other, fires in kept:
            other.fires = fires
            other.note()
        self.begun = self.held = True

    def _launch_filled(self, buckets: Iterable[Bucket]) -> None:
        for bucket in buckets:
            if bucket.phase is Phase.FILLING and _full(bucket):
                self._launch(bucket)
                bucket.advance(Phase.REDUCING)

    def _launch_full(self, held_back: int) -> None:
        while self._next < len(self.order) - held_back and _full(self.order[self._next]):
            bucket = self.order[self._next]
            self._next += 1
            self._launch(bucket)
            bucket.advance(Phase.REDUCING)

    def verify(self, sharded_only: bool = False) -> None:
        """Refuse gradients that were changed or replaced after backward: in a bucket already, or this rank's own still."""
        for slot in self.slots:
            if slot.sparse:
                continue  # reduced where it lies, and verified there
            if slot.changed and not (sharded_only and slot.bucket is not None and not slot.bucket.holds_parameters):
                what = "removed" if slot.param.grad is None else "changed"
                when = (
                    _ISSUED
                    if slot.filled
                    else "backward(); other ranks' gradients would be averaged with the changed one"
                )
                raise _changed(slot, what, when)
        for bucket in self.order:
            broken = None if bucket.gradient_check is None else bucket.gradient_check.broken()
            if broken is not None:
                raise _changed(bucket.slots[broken], "changed", _ISSUED)

    def flush(self) -> None:
        """Issue all that is left. Parameters without a gradient on this rank take part with the unused mark."""
        if self.dropped:
            return  # all of it is issued
        self._arrive()
        for bucket in self.order:
            for slot in bucket.slots:
                if not slot.filled:
                    slot.fill()
        self._issue()

    def _issue(self) -> None:
        if self._ordered:
            self._launch_full(held_back=0)
        else:
            self._launch_filled(self.order)

    def settle(self, buckets: Iterable[Bucket] | None = None) -> None:
        """Await reductions, in the given order."""
        for bucket in self.order if buckets is None else buckets:
            if bucket.phase is Phase.REDUCING:
                self._settle(bucket)
                bucket.advance(Phase.REDUCED)

    def settle_done(self) -> None:
        """Settle, in order of issue, what is reduced already, of updates in shards; waits for nothing.

        A reduction of which this rank needs nothing may be done before all ranks have issued it, and tells nothing.
        """
        for bucket in self.order if self._hold_last and all(map(_meets, self.order)) else ():
            if bucket.phase is Phase.REDUCING:
                if bucket.work is None or not bucket.work.done():
                    return
                self.settle([bucket])

    def check_skippable(self) -> None:
        """Raise :class:`StepSkipped` where gradients of this window must not be dropped."""
        if self.filled and not self._skippable:
            raise StepSkipped(
                "gradients were dropped after backward() and before step(), but with eager=True some parameters are "
                "updated already; call step() after every backward(), or wrap the optimizer with eager=False"
            )

    def drop(self, *, zeros: bool) -> None:
        """Issue what other ranks may wait for, and forget the gradients; :meth:`finish` waits.

        With `zeros`, a ``.grad`` that shows a bucket becomes zeros of its own, as the bucket is in use until then.
        """
        self._arrive()
        for slot in self.slots:
            slot.filled = slot.filled or slot.bucket is not None  # whatever is there: nothing becomes of it
            if zeros and slot.param.grad is not None and slot.param.grad is slot.view:
                slot.param.grad = torch.zeros_like(slot.param.grad)
        self._issue()
        self.dropped = True

    def leave_out(self) -> None:
        """Take part in a round that others have dropped: with nothing, where this rank has sent nothing yet.

        Gradients stay where they are, out of the buckets.
        """
        self._arrive()
        for bucket in self.order:
            for slot in bucket.slots:
                if not slot.filled:
                    slot.leave_out()
        self._issue()
        self.dropped = True

    def finish(self) -> None:
        """Wait for the reductions of a round that was dropped. Every rank has issued, or is about to issue, its part."""
        for bucket in self.order:
            if bucket.phase is Phase.REDUCING:
                if bucket.work is not None:
                    arrive(bucket.work)
                    bucket.work = None
                bucket.advance(Phase.REDUCED)
            if bucket.phase is Phase.REDUCED:
                bucket.advance(Phase.FILLING)
        self._next, self.dropped = 0, False

    def reset(self) -> None:
        """The round is over: the next gradient opens a new window."""
        for slot in self.slots:
            slot.clear()
        for bucket in self.order:
            if bucket.gradient_check is not None:
                bucket.gradient_check.open()
        if not self.dropped:
            self._next = 0
        self.reduced = self.synchronized = self.infinities_shown = False
        self.begun = self.held = False
        self.unscaled, self.scales = self.scales, {}

    @torch.no_grad()
    def scale_kept(self) -> None:
        """A forward begins: gradients of the last step that were not zeroed are what clipping has made of them.

        Not before, since nearly everybody zeroes them.
        """
        if self.unscaled:
            scales, self.unscaled = self.unscaled, {}
            for index, factor in scales.items():
                slot = self.slots[index]
                if slot.view is not None and slot.param.grad is slot.view:
                    slot.view.mul_(factor)


def _full(bucket: Bucket) -> bool:
    return all(map(_filled, reversed(bucket.slots)))  # the last one is the last to be, and asked most often


def _changed(slot: Slot, what: str, when: str) -> GradientChanged:
    return GradientChanged(
        f"the gradient of {slot.name!r} was {what} after {when}. Call optimizer.synchronize() after backward() "
        "and before changing gradients, or use optimizer.clip_grad_norm_()"
    )
