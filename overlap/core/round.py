"""A round: one set of reductions, from the first gradient after a step to the next step.

    backward    grad_ready … grad_ready ─▶ bucket full ─▶ issued, in bucket order, the same on all ranks
    a call      verify ─▶ flush (what did not fill) ─▶ settle each bucket ─▶ update ─▶ reset

What a round's gradients are, between backward and ``step()``, is its :class:`Stage`. Whether it is closed or dropped, the
ranks agree on in `overlap.core.closing`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto
from operator import attrgetter

import torch

from overlap.core.bucket import Bucket, Phase, Slot, TooManyGradients, changed, clear, too_many
from overlap.core.buckets.planner import Planner
from overlap.core.feature import Feature, listeners
from overlap.core.gathering import Transit
from overlap.core.other_wrappers import other_wrapper
from overlap.core.participants import Participants
from overlap.core.unsharding import Unsharder
from overlap.core.wire import Exchange
from overlap.transport.communicator import Communicator
from overlap.transport.forks import Origin
from overlap.transport.work import arrive

__all__ = ["GradientChanged", "Round", "Stage", "TooManyGradients", "gradient_changed"]


_fires, _filled, _meets = attrgetter("fires"), attrgetter("filled"), attrgetter("meets")
_UNREADABLE = (Phase.GATHERING, Phase.DUE)
_ISSUED_PHASES = (Phase.REDUCING, Phase.REDUCED)
_ISSUED = "its reduction had been issued; the change would be lost"


class GradientChanged(RuntimeError):
    """A gradient was changed after backward on this rank, where the average over ranks should have been."""


class Stage(Enum):
    """What the gradients of a round are."""

    LOCAL = auto()  # this rank's own; their reductions may be on their way
    SETTLED = auto()  # averages, in shards where updates are sharded; ``.grad`` of sharded parameters is not
    SYNCHRONIZED = auto()  # averages in ``.grad`` everywhere, which may be changed: step() uses them as they are
    SHOWN = auto()  # as SETTLED, and a GradScaler's verdict was written to ``.grad``, which no longer counts


_NEXT = {
    Stage.LOCAL: {Stage.SETTLED, Stage.SYNCHRONIZED},
    Stage.SETTLED: {Stage.SYNCHRONIZED, Stage.SHOWN},
    Stage.SYNCHRONIZED: set[Stage](),
    Stage.SHOWN: {Stage.SYNCHRONIZED},
}


class Round:
    """Which gradients are there and what is in flight, in `planner`'s buckets; one object for all rounds of an optimizer.

    Buckets are reduced over `reductions`, one for each lane, as `exchange` says. With `hold_last` the last bucket is issued
    by :meth:`flush` only. Where the strategy sees to one order on all ranks, buckets are issued as they fill: not
    `ordered`. With `deferred` updates, ``step()`` may have left some in `transit`, and their buffers are in use.
    """

    def __init__(
        self,
        planner: Planner,
        reductions: Sequence[Communicator],
        exchange: Exchange,
        transit: Transit,
        unsharder: Unsharder,
        participants: Participants,
        features: Sequence[Feature],
        *,
        passes: int,
        hold_last: bool,
        ordered: bool,
        deferred: bool,
    ) -> None:
        self.slots, self.order, self.passes = planner.slots, planner.order, passes
        self._planner, self._reductions, self._exchange = planner, tuple(reductions), exchange
        self._transit, self._participants = transit, participants
        self._hold_last, self._ordered, self._deferred = hold_last, ordered, deferred
        self._on_filled = listeners(features, "filled")
        self._on_verify = listeners(features, "verify")
        self.on_used, self._on_ended = listeners(features, "used"), listeners(features, "ended")
        self._next, self._origin = 0, Origin()
        self._gradient_memory = unsharder.gradient_memory
        self._streams = reductions[0].streams
        self._written_on = set[int]()  # streams that have put gradients of this round into buckets
        self._factor = -1, 1.0  # of a round, what its averages are multiplied by
        self.stage = Stage.LOCAL
        self.scales: dict[int, float] = {}  # by slot: what averages in shards were multiplied by, and `.grad` was not
        self.unscaled: dict[int, float] = {}  # … in the round before
        self.begun = False  # a gradient arrived …
        self.held = False  # … and all of this backward's wait for the call that closes the round
        self.hidden: list[Slot] = []  # whose gradients in shards a GradScaler does not see in `.grad`
        self.dropped = False  # reductions of a round that was dropped are on their way, in all buckets
        self.folded = False  # averages of earlier passes of this step wait in shards
        self.backwards = 0  # passes of this round whose gradients are to be reduced; counted where buckets are freed

    @property
    def touched(self) -> bool:
        """Whether a gradient arrived since the last step."""
        return any(map(_fires, self.slots)) or any(map(_filled, self.slots))

    @property
    def filled(self) -> bool:
        """Whether a gradient of this round is in its bucket, and reductions may be under way."""
        return any(map(_filled, self.slots))

    @property
    def sent(self) -> bool:
        """Whether a reduction of this round is issued."""
        return not self.dropped and any(bucket.phase in _ISSUED_PHASES for bucket in self.order)

    @property
    def quiet(self) -> bool:
        """Whether at most one reduction is under way: the second would wait for the wire, one may wait for a late rank."""
        before_last = self.order[self._next - 2] if self._next > 1 else None
        if before_last is None or before_last.work is None or before_last.phase is not Phase.REDUCING:
            return True
        return before_last.work.done()

    @property
    def comm(self) -> Communicator:
        """By which gradients travel; the first where there are several, which are alike."""
        return self._reductions[0]

    def travels_on(self, names: Iterable[str]) -> bool:
        """Whether a communicator of the reductions has one of `names`."""
        return not {comm.name for comm in self._reductions}.isdisjoint(names)

    def advance(self, to: Stage) -> None:
        if to not in _NEXT[self.stage]:
            raise RuntimeError(f"gradients that are {self.stage.name} cannot become {to.name}")
        self.stage = to

    # - Gradients come

    def begin(self, *, held: bool) -> None:
        """The first gradient is there. `held`: all of this backward's wait for the call that closes the round."""
        self.begun, self.held = True, held

    def grad_ready(self, slot: Slot) -> None:
        """A gradient was accumulated of a slot that is in a bucket."""
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
        if self._streams is not None:
            self._written_on.add(self._streams.current())
        if not all(map(_filled, reversed(bucket.slots))):  # the last one is the last to be, and asked most often
            return
        for told in self._on_filled:
            told(bucket)
        if self._ordered:
            self._launch_full(held_back=1 if self._hold_last else 0)
        else:
            self._launch(bucket)

    def note(self, slot: Slot) -> None:
        """A gradient was accumulated of a slot that is in no bucket."""
        slot.fires += 1
        slot.note()

    def accumulate(self, slot: Slot) -> None:
        """A gradient was accumulated inside ``no_sync()``."""
        if not slot.filled:
            slot.note()

    def restarted(self, slot: Slot) -> dict[Slot, int]:
        """Another gradient came of `slot`, which is filled: those of a round that the script has dropped by hand are gone.

        Slots that still have theirs were filled by this new backward before anybody could notice. They are returned with
        their counts, taken out of their buckets: they wait, as all that follow do. Raises where nothing was dropped.
        """
        if slot.param.grad is slot.view:
            raise too_many(slot)
        kept = {other: other.fires for other in self.slots if other.filled and not (other.dropped or other.absent)}
        for other in kept:
            assert other.bucket is not None
            if other.bucket.phase is not Phase.FILLING and (other.bucket.frees_gradients or not other.bucket.sharded):
                raise GradientChanged(
                    f"gradients were dropped by hand after backward(), and the next one of {other.name!r} was sent with "
                    "what was left of them; call optimizer.zero_grad() to skip a step"
                )
            other.take_out()
        return kept

    def restart(self, kept: dict[Slot, int]) -> None:
        """After the drop: `kept` is what a new round has, so far."""
        for slot, fires in kept.items():
            slot.fires = fires
            slot.note()
        self.begin(held=True)

    # - Buckets go

    def _launch(self, bucket: Bucket) -> None:
        if bucket in self._transit.pending:
            self._transit.arrive(bucket)  # nobody used these parameters since the last step
        if self._streams is not None and len(self._written_on) > 1:
            self._streams.follow(self._written_on)  # backward computes a gradient on the stream that its forward used
        if bucket.frees_gradients:
            self._gradient_memory.take(bucket)
        if not self._exchange.plain:
            self._exchange.load(bucket)
        participants = self._participants
        if not participants.opened:
            participants.open()
        bucket.round = participants.round
        bucket.collectives.reduce(self._reductions[bucket.lane], bucket)
        bucket.advance(Phase.REDUCING)

    def _launch_full(self, held_back: int) -> None:
        order, last = self.order, len(self.order) - held_back
        while self._next < last and all(map(_filled, reversed(order[self._next].slots))):
            self._next += 1
            self._launch(order[self._next - 1])

    def _issue(self) -> None:
        if self._ordered:
            self._launch_full(held_back=0)
        else:
            for bucket in self.order:
                if bucket.phase is Phase.FILLING and all(map(_filled, bucket.slots)):
                    self._launch(bucket)

    def flush(self) -> None:
        """Issue all that is left. Parameters without a gradient on this rank take part with zeros."""
        if self.dropped:
            return  # all of it is issued
        self._issue_all(Slot.fill)

    def _issue_all(self, take: Callable[[Slot], None]) -> None:
        self._arrive_left()
        for bucket in self.order:
            for slot in bucket.slots:
                if not slot.filled:
                    take(slot)
        self._issue()

    def _arrive_left(self) -> None:
        if self._deferred:
            self._transit.arrive_all()  # nobody used these since the last step; their buffers are free then

    @property
    def complete(self) -> bool:
        """Whether this rank has, or had when the bucket was filled, a gradient for every parameter in a bucket."""
        return all(
            slot._given is not None if slot.filled else slot.param.grad is not None
            for bucket in self.order
            for slot in bucket.slots
        )

    def take_unused(self, unused: Sequence[bool]) -> None:
        """All reductions are issued. `unused`, by slot: no rank has a gradient for it, so it will be left alone."""
        for slot, nobody in zip(self.slots, unused, strict=True):
            if slot.bucket is not None:
                slot.unused = nobody
        for bucket in self.order:
            if bucket.phase is Phase.REDUCED and bucket.sharded:  # before all ranks had said so
                assert self._planner.shards is not None
                self._planner.shards.take(bucket)

    # - What comes back

    def verify(self) -> None:
        """Refuse gradients that were changed or replaced after backward: in a bucket already, or this rank's own still.

        Of averages that every rank has whole, ``.grad`` is the script's.
        """
        if self.stage in (Stage.SYNCHRONIZED, Stage.SHOWN):
            return
        for slot in changed(self.slots):
            if slot.claimed:
                continue  # reduced where it lies, and verified there
            if self.stage is Stage.SETTLED and slot.bucket is not None and not slot.bucket.sharded:
                continue
            what = "removed" if slot.param.grad is None else "changed"
            local = "backward(); other ranks' gradients would be averaged with the changed one"
            raise gradient_changed(slot, what, _ISSUED if slot.filled else local)
        for check in self._on_verify:
            check()

    def reduced(self, bucket: Bucket) -> None:
        """Await the bucket's reduction: its averages are where updates take them from."""
        if bucket.work is not None:  # spelled out: a call for each bucket, which everybody waits for
            arrive(bucket.work)
            bucket.work = None
            if bucket.offloads:
                bucket.fetch_share()
            if bucket.frees_gradients:
                bucket.free_gradients()
        if bucket.offloads:
            bucket.await_copies()
        if not self._exchange.plain:
            self._exchange.unload(bucket)
        shards = self._planner.shards
        if bucket.sharded:
            assert shards is not None, "only buckets that hold parameters are updated in shards"
            shards.take(bucket)
        factor = self._factor[1] if self._factor[0] == bucket.round else self.factor(bucket.round)
        if factor != 1 or not self._exchange.plain:
            self._exchange.rescale(bucket, shards, factor)
        if bucket.frees_gradients:
            bucket.add_kept()

    def factor(self, number: int) -> float:
        """By what averages of round `number` are multiplied where ranks had joined.

        It is certain once any reduction of that round is done.
        """
        if self._factor[0] != number:
            factor = self._participants.factor(number)
            self._factor = number, factor if self._exchange.averages else 1.0
        return self._factor[1]

    def settle(self, buckets: Iterable[Bucket] | None = None) -> None:
        """Await reductions, in the given order."""
        for bucket in self.order if buckets is None else buckets:
            if bucket.phase is Phase.REDUCING:
                self.reduced(bucket)
                bucket.advance(Phase.REDUCED)

    def settle_done(self) -> None:
        """Settle, in order of issue, what is reduced already, of updates in shards; waits for nothing.

        A reduction of which this rank needs nothing may be done before all ranks have issued it, and tells nothing.
        """
        if not self._hold_last or self._participants.away or not all(map(_meets, self.order)):
            return
        for bucket in self.order:
            if bucket.phase is Phase.REDUCING:
                if bucket.work is None or not bucket.work.done():
                    return
                self.reduced(bucket)
                bucket.advance(Phase.REDUCED)

    @property
    def may_fold(self) -> bool:
        """Whether all buckets are freed, so that their averages can be kept in shards while others are added."""
        return self.stage is Stage.LOCAL and all(bucket.freed for bucket in self.order)

    def fold(self) -> None:
        """The averages, which are settled, wait in shards for those of another backward, as after a step."""
        for bucket in self.order:
            bucket.stand_in()
            bucket.advance(Phase.FILLING)

    def show_hidden(self) -> None:
        """A GradScaler has looked."""
        for slot in self.hidden:
            assert slot.freed is not None
            slot.param.grad = slot.freed.sent
        self.hidden.clear()

    # - The round ends

    def drop(self, *, zeros: bool) -> None:
        """Issue what other ranks may wait for, and forget the gradients; :meth:`finish` waits.

        With `zeros`, a ``.grad`` that shows a bucket becomes zeros of its own, as the bucket is in use until then.
        """
        self._arrive_left()
        self._gradient_memory.give_up()
        for slot in self.slots:
            slot.filled = slot.filled or slot.bucket is not None  # whatever is there: nothing becomes of it
            if zeros and slot.param.grad is not None:
                if slot.param.grad is slot.view:
                    slot.param.grad = torch.zeros_like(slot.param.grad)
                elif slot.freed is not None and slot.param.grad is slot.freed.sent:
                    slot.param.grad = slot.freed.zero
        for bucket in self.order:
            if bucket.frees_gradients and bucket.phase is Phase.FILLING:
                bucket.gradients.restore()  # also where no gradient has come: it is read
        self._issue()
        self.dropped = True

    def leave_out(self) -> None:
        """Take part in a round that others have dropped: with nothing, where this rank has sent nothing yet.

        Gradients stay where they are, out of the buckets.
        """
        self._issue_all(Slot.leave_out)
        self.dropped = True

    def finish(self) -> None:
        """Wait for the reductions of a round that was dropped. Every rank has issued, or is about to issue, its part."""
        for bucket in self.order:
            if bucket.phase is Phase.REDUCING:
                bucket.settle()
                bucket.advance(Phase.REDUCED)
            if bucket.phase is Phase.REDUCED:
                bucket.advance(Phase.FILLING)
        self._next, self.dropped = 0, False

    def abandon(self) -> None:
        """Await the reductions of a backward pass that no step followed. All ranks have issued the same ones."""
        for bucket in self.order:
            bucket.settle()

    def reset(self) -> None:
        """The round is over: the next gradient opens a new one."""
        clear(self.slots)
        for told in self._on_ended:
            told()
        if not self.dropped:
            self._next = 0
        self.stage = Stage.LOCAL
        self.begun = self.held = self.folded = False
        self.backwards = 0
        self._written_on.clear()
        if self._gradient_memory.used:
            self._gradient_memory.end_round(self.order)
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


def gradient_changed(slot: Slot, what: str, when: str = _ISSUED) -> GradientChanged:
    """What to raise where the gradient was `what` (changed, removed) after `when`, by the script or a wrapper."""
    wrapper = other_wrapper(None, slot.param)
    if wrapper is not None:
        return GradientChanged(f"the gradient of {slot.name!r} was {what} after backward(): {wrapper}")
    return GradientChanged(
        f"the gradient of {slot.name!r} was {what} after {when}. Call optimizer.synchronize() after backward() "
        "and before changing gradients, or use optimizer.clip_grad_norm_()"
    )
