"""The calls of a script in which all ranks agree on a round: what ends it, who takes part, and with what.

A round is one set of reductions. Backward fills it; ``step()``, ``synchronize()``, clipping and a GradScaler close it, and
``zero_grad()`` drops it. Each of these says in one tally what this rank knows (`overlap.core.tally`), and goes on by what
all ranks said.

    backward          gradients fill buckets, full ones are reduced          or wait for the call: hold()
    close()           post ─▶ flush what is left ─▶ read ─▶ verdict ─▶ new buckets for what came late or was converted
    drop()            post ─▶ flush what is left; whether others mean the same is read in the next call
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import FrameType

import torch

from overlap.core.alike import NOTHING, Clipped, DifferentScales
from overlap.core.bucket import Slot
from overlap.core.buckets.arrangement import Arrangement
from overlap.core.buckets.conversion import Change, changes, difference
from overlap.core.feature import Feature, Policy, listeners
from overlap.core.participants import Participants
from overlap.core.round import Round
from overlap.core.tally import Call, Calls, Heard, Said, Tally, Verdict, verdict, why_ended
from overlap.core.unsharding import Unsharder
from overlap.transport.communicator import Communicator, ReduceOp
from overlap.transport.objects import SignatureMismatch, allgather_object
from overlap.transport.operation import all_reduce

__all__ = ["BACKWARD", "Closing", "OtherRankFailed", "zeroing"]

BACKWARD = "backward()"  # the call that closes a round while passes go on
_CATCHES_UP = "join()"  # … and the one in which a rank that has joined is told of passes
_PASSES_GO_ON = (BACKWARD, _CATCHES_UP)

_ZERO_GRAD = torch.nn.Module.zero_grad.__code__
_DEEP = 16  # frames between it and a gate
_DIGESTS = 2**61  # so many fit into the tally


class OtherRankFailed(RuntimeError):
    """Another rank has raised in a call that all ranks make, so this one does, too."""


class Closing:
    """Agrees with the other ranks of `calls` in every call on one optimizer. All methods, but for those that say so:
    on every rank, in the same order.
    """

    def __init__(
        self,
        calls: Communicator,
        round: Round,
        arrangement: Arrangement,
        unsharder: Unsharder,
        participants: Participants,
        policy: Policy,
        features: Sequence[Feature],
    ) -> None:
        self._unsharder = unsharder
        self._comm, self._slots, self._round, self._arrangement = calls, round.slots, round, arrangement
        self._participants, self._policy = participants, policy
        self._on_news, self._on_closed = listeners(features, "news"), listeners(features, "closed")
        self._compared = [feature for feature in features if listeners([feature], "digest")]
        self._tally, self._calls = Tally(calls), Calls()
        self.closed = False  # all reductions of this round are issued, on all ranks
        self.ended = ""  # why this optimizer cannot step any more
        self._apart = False  # … as this rank has dropped a round that others mean
        self._alike = False  # all ranks closed this round after as many calls
        self._clipped = NOTHING  # what averages of this round were clipped by, and not agreed on yet
        self.scale: torch.Tensor | None = None  # by which a GradScaler has multiplied the loss of this round

    # - While gradients come

    def hold(self) -> bool:
        """Whether gradients have to wait for the call that closes the round. On one rank; waits for nobody.

        Parameters have become another type than their buckets'; or another rank may not be done with an earlier round.
        """
        self._hear_of_drop(wait=False)
        return self._tally.dropping or self._calls.doubt or bool(changes(self._slots))

    # - Calls that need averages

    def close(
        self, call: str, check: Callable[[], None] | None = None, *, again: bool = False, steps: bool = False
    ) -> bool:
        """All gradients of this round reduced or on their way, the last buckets, too, before anything uses them.

        Args:
            call: what the script has called.
            check: raises where this rank cannot go on; then all ranks raise.
            again: agree once more in a round that is closed already.
            steps: parameters are about to be updated, so hyper-parameters, say, have to be the same on all ranks.

        Returns whether the round is closed; it is not on a rank that has joined, where other ranks had dropped the round.
        Raises what `check` or a look at the gradients raises, :class:`OtherRankFailed` where another rank did so, and
        ``RuntimeError`` where ranks have made different calls, ``SignatureMismatch`` where they would step differently.
        """
        self._require_open()
        if self.closed and not again:
            return True
        if self._unsharder.active and call not in _PASSES_GO_ON:
            self._unsharder.over(self._participants)
        while True:
            if self.closed:
                self._participants.again(call)
            else:
                self._participants.start(call)  # joined ranks are called before anything waits for them
            self._hear_of_drop(wait=True)
            converted = changes(self._slots)
            failure = self._failure(check, converted)
            waits = not self.closed and (bool(converted) or self._calls.doubt or self._arrangement.learning)
            late = [] if self.closed else self._late()
            news = [] if self.closed else [told() for told in self._on_news]
            planned = not (self.closed or self._arrangement.learning)
            mine = replace(
                self._said(Call.CLOSE),
                late=bool(late),
                converted=bool(converted),
                complete=planned and not self._participants.following and self._round.complete,
                news=any(news),
                sent=not waits,
                failed=failure is not None,
                digest=self._digest() if steps and self._compared else None,
            )
            self._tally.post(mine, call)
            if not waits and not self.closed:
                self._round.flush()
                self._round.settle_done()  # while the last ones are on their way
            heard = self._tally.read()
            if self._follow(heard, failure, self._clipped):
                if self._unsharder.shared and call != BACKWARD:
                    self._unsharder.heard(self._participants, heard.passed)
                break
            if self._participants.following:
                return False
        if not self.closed:
            self._complete(heard, converted, late)
        self._alike = heard.alike
        if self._participants.away:
            # Raises, on every rank, where one has joined that cannot: settle_done() may have asked before that was known.
            self._participants.factor(self._participants.round)
        return True

    def _complete(self, heard: Heard, converted: list[Change], late: list[Slot]) -> None:
        arrangement, round = self._arrangement, self._round
        if heard.converted:
            self._rebuild(heard, converted)
        used = arrangement.learn()
        arrangement.release()
        round.flush()
        if heard.late:  # after the flush: how many buckets were issued before it differs between ranks
            arrangement.extend(late)
            round.flush()
        if used is None and (heard.late or heard.converted or not heard.complete):
            used = self._used()
        if used is not None:
            round.take_unused([not one for one in used])
        if self._on_closed:
            number = self._participants.round
            for told in self._on_closed:
                told(heard.news, lambda: self._participants.leader, lambda: round.factor(number))
        self.closed = True

    def _used(self) -> list[bool]:
        """All ranks have filled all buckets, and each of them lacks a gradient. By slot: whether some rank has it."""
        used = torch.tensor([not slot.absent for slot in self._slots], dtype=torch.uint8, device="cpu")
        if self._comm.size > 1:
            self._comm.run(all_reduce(used, used, ReduceOp.MAX, label="used parameters"))
        return [bool(one) for one in used.tolist()]

    def end_step(self) -> None:
        """The averages were used. On one rank."""
        self._calls.step(self._alike)
        self._end_round()

    def ask(
        self,
        mine: bool,
        call: str,
        clipped: Clipped = NOTHING,
        check: Callable[[], None] | None = None,
        *,
        passes_over: bool = True,
    ) -> bool:
        """Whether any rank has gradients that no step has used, `mine` if this one has. Its passes are over, or come later.

        Raises on every rank where what they are `clipped` by is not alike, or `check` raises on one.
        """
        self._require_open()
        if self._unsharder.active and passes_over and call != BACKWARD:
            self._unsharder.over(self._participants)
        clipped += self._clipped
        while True:
            self._participants.ask(call)
            self._hear_of_drop(wait=True)
            failure = _raised(check)
            said = replace(self._said(Call.ASK), gradients=mine, failed=failure is not None, clipped=clipped.number)
            self._tally.post(replace(said, sent=self.closed or self._round.sent), call)
            heard = self._tally.read()
            agreed = self._follow(heard, failure, clipped)
            if agreed and self._unsharder.shared and passes_over and call != BACKWARD:
                self._unsharder.heard(self._participants, heard.passed)
            if agreed or self._participants.following:
                return heard.gradients

    def clip(self, clipped: Clipped) -> None:
        """Averages that every rank has whole are clipped by this. On one rank; the next call agrees on it, or raises."""
        self._clipped += clipped

    def meet(self, what: str, check: Callable[[], None] | None = None) -> None:
        """Before something that waits for all ranks. Raises :class:`.CannotJoin` on all of them, where some have joined.

        Where `check` raises on one rank, all raise.
        """
        self._participants.call_together(what)
        self.ask(False, what, check=check, passes_over=False)
        self._participants.refuse_together(what)

    # - Calls that need none

    def count(self, *, unseen: bool = False) -> None:
        """The script has made a call that drops what there is, or finds nothing. On one rank.

        `unseen`: ranks without gradients do not notice that it was made.
        """
        self._calls.count(unseen=unseen)
        self._hear_of_drop(wait=False)
        if self._apart:
            self._require_open()

    def drop(self, *, zeros: bool = False) -> None:
        """Forget the gradients of this round. On one rank; waits for nobody: [Note: who drops a round].

        With `zeros`, what shows a bucket in ``.grad`` becomes zeros of its own, as the buckets are still in use.
        """
        round = self._round
        self._policy.refuse_drop()
        if self.closed or round.sent:
            self._tally.post(replace(self._said(Call.DROP), number=self._calls.last, sent=True), "zero_grad()")
            round.drop(zeros=zeros)
            self._calls.drop()
            if self.closed:  # so all ranks have issued all of it
                round.finish()
            self._end_round()
        else:
            if round.touched:
                self._calls.alone = True
            round.reset()

    def drop_everywhere(self) -> None:
        """All ranks drop the gradients of this round, which is closed, and know it of each other."""
        self.close("step()")
        self._round.drop(zeros=False)
        self._round.finish()
        self._calls.step(alike=False)
        self._end_round()

    def catch_up(self) -> None:
        """On a rank that has joined: others are past this round, which they have dropped."""
        self.close(_CATCHES_UP, again=True)

    # - What all ranks do by what was said

    def _said(self, call: Call) -> Said:
        participants, calls = self._participants, self._calls
        number, clipped = None if participants.following else calls.next, self._clipped.number
        return Said(
            call,
            participants.round,
            participants.rank,
            number,
            passed=self._unsharder.passed,
            alone=calls.alone,
            clipped=clipped,
            scale=0.0 if self.scale is None else float(self.scale),
        )

    def _follow(self, heard: Heard, failure: Exception | None, clipped: Clipped) -> bool:
        """Whether all ranks mean this call; False where others have dropped the round before it, which is over now."""
        found = verdict(heard)
        mixed = heard.clipped is not None and not heard.clipped.alike
        scaled = heard.scale is not None and not heard.scale.alike
        self._participants.answered(repeated=found in (Verdict.FAILED, Verdict.UNLIKE) or mixed or scaled)
        if found is Verdict.AGREED:
            if mixed:
                raise self._shared_failure(None if clipped.refuse is None else clipped.refuse())
            if scaled:
                assert heard.scale is not None
                raise DifferentScales(heard.scale)
            return True
        if found is Verdict.DROPPED:
            assert heard.drop is not None
            self._void()
            self._calls.passed(heard.drop)
            return False
        if found is Verdict.FAILED:
            raise self._shared_failure(failure)
        if found is Verdict.UNLIKE:
            raise self._difference()
        raise self._end(found, heard)

    def _void(self) -> None:
        """Nothing becomes of this round, here and elsewhere: this rank's part is completed and awaited."""
        if not self.closed:
            self._round.leave_out()
        self._round.finish()
        self._end_round()

    def _end_round(self) -> None:
        self._round.reset()
        self.closed, self._clipped, self.scale = False, NOTHING, None
        self._participants.close()

    def _hear_of_drop(self, *, wait: bool) -> None:
        """What became of the round that this rank has dropped, once all others have said what they make of it."""
        if self._tally.dropping and (wait or self._tally.done):
            heard = self._tally.read()
            found = verdict(heard)
            if found is not Verdict.DROPPED:
                ended, self._apart = self._end(found, heard), True
                if wait:
                    raise ended
                return
            if self._round.dropped:
                self._round.finish()

    def _shared_failure(self, failure: Exception | None) -> Exception:
        """What this rank raises: its own error, or that of another one. The round stays as it is, to be closed again."""
        said = None if failure is None else f"{type(failure).__name__}: {failure}"
        texts = allgather_object(self._comm, said)
        if failure is not None:
            return failure
        rank, text = next((rank, text) for rank, text in enumerate(texts) if text is not None)
        return OtherRankFailed(f"rank {self._participants.ranks[rank]} has raised in the same call: {text}")

    def _digest(self) -> int | None:
        """Of what has to be the same on all ranks that step. One that has joined steps with what the others tell it."""
        if self._participants.following:
            return None
        together = 0
        for feature in self._compared:
            together = (together * 31 + feature.digest()) % _DIGESTS
        return together

    def _difference(self) -> Exception:
        """What all ranks raise whose digests differ. The round stays as it is, to be closed again."""
        mine = None if self._participants.following else [feature.told() for feature in self._compared]
        everybodys = dict(zip(self._participants.ranks, allgather_object(self._comm, mine), strict=True))
        given = {rank: told for rank, told in everybodys.items() if told is not None}
        found = (
            feature.difference({rank: told[number] for rank, told in given.items()})
            for number, feature in enumerate(self._compared)
        )
        return SignatureMismatch(next(filter(None, found), "ranks are about to make different steps"))

    def _end(self, found: Verdict, heard: Heard) -> RuntimeError:
        self._participants.end()
        self.ended = why_ended(found, heard, self._participants.ranks)
        return RuntimeError(self.ended)

    def _require_open(self) -> None:
        if self.ended:
            raise RuntimeError(self.ended)

    # - What this rank knows

    def _failure(self, check: Callable[[], None] | None, converted: list[Change]) -> Exception | None:
        def verify() -> None:
            if check is not None:
                check()
            if converted and self._round.filled:
                first = converted[0]
                raise RuntimeError(
                    f"parameter {first.name!r} was converted from {first.before} to {first.now} between backward() and "
                    "step(), while gradients were on their way; convert after step() or zero_grad()"
                )
            self._round.verify()

        return _raised(verify)

    def _late(self) -> list[Slot]:
        """Parameters in no bucket that take part here. What is frozen and has a gradient is stepped, as by torch."""
        return [slot for slot in self._arrangement.unplanned if slot.param.requires_grad or slot.param.grad is not None]

    def _rebuild(self, heard: Heard, mine: list[Change]) -> None:
        """New buckets where all ranks have converted parameters since the last step, for gradients that wait for them.

        Raises ``SignatureMismatch`` on every rank where some have not, or to another type.
        """
        participants = self._participants
        told = dict(zip(participants.ranks, allgather_object(self._comm, mine), strict=True))
        present = [participants.ranks[index] for index in participants.present(participants.round)]
        converted = {rank: changed for rank, changed in told.items() if changed}
        away = sorted(set(participants.ranks).difference(present))
        problem = difference(converted, present)
        if problem is None and not away:
            self._arrangement.follow_conversion()
            return
        if heard.unconverted:
            self._void()
        error: Exception = SignatureMismatch(problem)
        if problem is None:
            error = participants.cannot_join(
                f"parameters were converted on ranks {sorted(converted)}, which every rank has to do, and ranks {away} "
                "have joined; convert the model before or after join()"
            )
        self.ended = f"this optimizer cannot go on: {error}"
        participants.end()
        raise error


def _raised(check: Callable[[], None] | None) -> Exception | None:
    try:
        if check is not None:
            check()
    except (RuntimeError, TypeError, ValueError) as error:
        return error
    return None


def zeroing(frame: FrameType | None) -> FrameType | None:
    """The call of ``Module.zero_grad()`` that `frame` is in, if there is one."""
    for _ in range(_DEEP):
        if frame is None or frame.f_code is _ZERO_GRAD:
            return frame
        frame = frame.f_back
    return None
