"""From the first gradient after a step to the next step: which gradients are there, what is in flight.

backward:   grad_ready … grad_ready ─▶ bucket full ─▶ launch, in bucket order, the same on all ranks
step():     verify ─▶ flush (what did not fill) ─▶ settle each bucket ─▶ update ─▶ reset
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from overlap.core.attendance import Attendance
from overlap.core.bucket import Bucket, Phase, Slot
from overlap.transport.forks import Origin

__all__ = ["GradientChanged", "GradientWindow", "StepSkipped", "TooManyGradients"]


_UNREADABLE = (Phase.GATHERING, Phase.DUE)
_ISSUED = "its reduction had been issued; the change would be lost"


class TooManyGradients(RuntimeError):
    """More backward passes than announced ran before ``step()``."""


class GradientChanged(RuntimeError):
    """A gradient was changed after backward on this rank, where the average over ranks should have been."""


class StepSkipped(RuntimeError):
    """Gradients were dropped after some of them had been used already (``eager=True``)."""


class GradientWindow:
    """Readiness of every slot and bucket. `launch(bucket)` issues its reduction; `settle(bucket)` awaits the work.

    `arrive()` frees the buffers of updates that were left for after ``step()``. `drop()` hears of gradients that were
    dropped without a word, before their reductions are completed. `order` is the agreed order of issue. With
    `hold_last` its last bucket is issued by :meth:`flush` only. Where buckets are updated before ``step()``, a step cannot
    be skipped: not `skippable`. Where the strategy sees to one order on all ranks, buckets are launched as they fill: not
    `ordered`. `attendance` counts the windows whose reductions were all issued as rounds.
    """

    def __init__(
        self,
        slots: list[Slot],
        order: list[Bucket],
        attendance: Attendance,
        *,
        passes: int,
        hold_last: bool,
        skippable: bool = True,
        ordered: bool = True,
        launch: Callable[[Bucket], None],
        settle: Callable[[Bucket], None],
        arrive: Callable[[], None],
        drop: Callable[[], None],
    ) -> None:
        self.slots, self.order, self.passes = slots, order, passes
        self._attendance = attendance
        self._hold_last, self._skippable, self._ordered = hold_last, skippable, ordered
        self._launch, self._settle, self._arrive, self._drop = launch, settle, arrive, drop
        self._next, self._origin = 0, Origin()
        self.reduced = False  # all reductions of this window were awaited, by clipping or synchronize()
        self.synchronized = False  # .grad holds averages: step() uses them as they are
        self.infinities_shown = False  # a GradScaler wrote to .grad, which no longer counts
        self.begun = False  # a gradient arrived

    @property
    def touched(self) -> bool:
        """Whether a gradient arrived since the last step."""
        return any(slot.fires or slot.filled for slot in self.slots)

    @property
    def issued(self) -> bool:
        """Whether every reduction of this window is issued."""
        return bool(self.order) and all(bucket.phase in (Phase.REDUCING, Phase.REDUCED) for bucket in self.order)

    @property
    def meets(self) -> bool:
        """Whether nobody's last reduction is done before every rank has issued all of them."""
        return bool(self.order) and self.order[-1].meets

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
        return any(slot.filled for slot in self.slots)

    def grad_ready(self, slot: Slot) -> None:
        """A gradient was accumulated into ``slot.param.grad``."""
        if slot.filled:
            self._restart_or_refuse(slot)
        slot.fires += 1
        if slot.fires < slot.expected * self.passes:
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
        slot.fill()
        if not bucket.full:
            return
        if bucket.gradient_check is not None:
            bucket.gradient_check.close()
        if self._ordered:
            self._launch_full(held_back=1 if self._hold_last else 0)
        else:
            self._launch_filled([bucket])

    def await_step(self, slot: Slot) -> None:
        """A gradient was accumulated which is reduced in ``step()``, and not before."""
        if slot.filled:
            self._restart_or_refuse(slot)
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
        # The gradients of the last window were dropped (model.zero_grad()) and its step skipped. Slots that still have
        # theirs were filled by this new backward before anybody could notice.
        self.check_skippable()
        self._drop()
        self.discard(keep=[other for other in self.slots if other.filled and not (other.dropped or other.absent)])

    def _launch_filled(self, buckets: Iterable[Bucket]) -> None:
        for bucket in buckets:
            if bucket.phase is Phase.FILLING and bucket.full:
                self._launch(bucket)
                bucket.advance(Phase.REDUCING)

    def _launch_full(self, held_back: int) -> None:
        while self._next < len(self.order) - held_back and self.order[self._next].full:
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
        self._arrive()
        for bucket in self.order:
            for slot in bucket.slots:
                if not slot.filled:
                    slot.fill()
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
        """Settle, in order of issue, what is reduced already; waits for nothing."""
        for bucket in self.order:
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

    def discard(self, keep: Iterable[Slot] = ()) -> None:
        """A step was skipped: complete what other ranks may wait for, and forget the gradients."""
        if self.filled:
            self.check_skippable()
            self._attendance.start("discard")
            self.flush()
            self._attendance.meet(not self.meets)
            self.settle()
            self._attendance.announce("discard")
        for bucket in self.order:
            if bucket.phase is Phase.REDUCED:
                bucket.advance(Phase.FILLING)
        kept = {slot.index: slot.fires for slot in keep}
        self.reset()
        for slot in self.slots:
            if slot.index in kept:
                slot.fires = kept[slot.index]
                slot.fill()

    def leave_out(self) -> None:
        """A round to which this rank contributes nothing; gradients stay where they are, and nothing becomes of the rest.

        Whoever returns from it knows what every rank told the others before it issued its part.
        """
        self._attendance.start("discard")
        self._arrive()  # before anything is written to buffers
        for bucket in self.order:
            for slot in bucket.slots:
                slot.leave_out()
        self.flush()
        self._attendance.meet(not self.meets)
        self.settle()
        self._attendance.announce("discard")
        for bucket in self.order:
            bucket.advance(Phase.FILLING)
        self.reset()

    def reset(self) -> None:
        """After a step: the next gradient opens a new window."""
        for slot in self.slots:
            slot.clear()
        for bucket in self.order:
            if bucket.gradient_check is not None:
                bucket.gradient_check.open()
        self._next = 0
        self.reduced = self.synchronized = self.infinities_shown = False
        self.begun = False
        self._attendance.close()


def _changed(slot: Slot, what: str, when: str) -> GradientChanged:
    return GradientChanged(
        f"the gradient of {slot.name!r} was {what} after {when}. Call optimizer.synchronize() after backward() "
        "and before changing gradients, or use optimizer.clip_grad_norm_()"
    )
