"""join() by tallies: a protocol, and a model of it on which random scripts try it.

The library's join() works by letters today (`overlap/features/join.py`, `overlap/features/join_rounds.py`). What follows is
the protocol, tried here, by which it can come to the tally. The library contains nothing of it yet.

[Note: what it is for]
A rank that is out of data calls join(), and the others go on. It is needed still: every collective operation waits for all
ranks, so it has to issue its part of each, with nothing in it. Which ones come is decided by the script, which it does not
run any more; so it has to be told. With letters, present ranks write to those that have joined, and threads answer. But
every call that ends a round begins with a tally (`overlap.core.tally`), for which all ranks wait anyway. Here a joined rank
posts its part of one tally for each optimizer, and goes on with whichever the others have answered.

A *present* rank has not joined. An *act* is what all ranks do after a tally: clip, synchronize, look for infinite
gradients, step. A *control round* is one all-gather of objects on the channel that carries the tallies.

[Note: invariant]
That channel carries tallies, and control rounds that directly follow a tally which announces them on all ranks. For each
optimizer, a joined rank has a tally posted, or is in an act that every present rank of the optimizer is in, too. So it
never waits for one optimizer alone, but in an act that all others are in.

[Note: what a tally says, and what follows]
This is pure, in `join_tally.py`. A joined rank gives no number. It says `failed` if it had gradients that nobody stepped,
or a closed round, when it called join(). `gone`: its optimizer is garbage. `needs`: this is a call that needs every rank,
or a join() that has failed. From the largest of each number, in this order:
    JOINED            nobody gives a number: join() is at its end for this optimizer; calls are counted from there anew
    GONE              the optimizer is garbage on a joined rank, and others go on with it: all raise CannotJoin
    as the library    where rounds differ, or a rank drops the round
    REFUSED           a call that needs every rank, and some have joined: all raise CannotJoin
    as the library    FAILED, AGREED, …
Control rounds follow two of them only. After the others some present rank may have posted its tally and gone on.
    AGREED, a rank has joined, and the call closes a round: each present rank gives its call and its hyper-parameters,
        joined ones give None. Who gave something is present, and counts in averages; joined ranks take both over.
    FAILED: the errors' texts. If a joined rank has one, all raise CannotJoin. Else present ranks raise their own, and
        joined ranks go on: an error of a script's belongs where scripts run.

[Note: present ranks]
Each call in a closed round begins with a tally if some rank is known to be away, so that those hear of it. So it does in a
job with process sets, even if nobody is away: a rank of this optimizer may have raised CannotJoin in a call on another
one, whose ranks are others, and be in join(); then who relies on the closed round waits for its part of the act.
Elsewhere a second call in a closed round needs no tally. ask(), zero_grad() and drops are as without join(). A call that
waits for all ranks posts `needs`. load_state_dict() waits for nobody: if the last control round told of joined ranks, it
posts `needs`, does not read, and raises CannotJoin. Averages that are settled before the tally is read divide by all
ranks, and are rescaled after it if some are away. Early updates in backward have no rank away: no joined rank has posted
its part of these reductions before this rank's tally.

[Note: joined ranks]
join() posts a tally for each optimizer, waits for nobody, then follows: one follower for each distinct set of ranks, at
the same time. A follower waits for any posted tally of its optimizers that all have answered:
    JOINED      the optimizer is at its end; nothing is posted
    own drop    from before join(): does not await its reductions; posts
    DROPPED     issues the rest of the round, empty, and goes to the next one; does not await its reductions; posts
    AGREED      asks: posts. Closes: control round, closes the round with nothing, does the act; posts
    FAILED      control round; posts, or raises
    REFUSED     raises, but on the rank that said `needs`, if it has called join() since; GONE raises
Void reductions are awaited when the next tally has been read: by then every rank has issued its part of them. When all
optimizers are at their ends, and in the order of their registration, one control round each: in how many tallies has
a rank said that it had joined, and its hyper-parameters. Those of the rank with the fewest, which joined last, hold for
all. Last, a barrier of the job. If join() raises, so does every call until this rank has called it again. A posted tally
stays valid then and is read by the next join(); nothing is withdrawn. All ranks raise, so all call join() in the end.

[Note: what failed first]
In the model, in so many of 1,000 scripts.
 1. Acts announced as broadcasts, until the round ends: A.clip, B.clip, B.step, A.step deadlocks (199).
 2. The control round of the end at once: ranks see the ends of several optimizers in different orders (152).
 3. Joined ranks await a void round: its other joined rank is in another optimizer's act (3); so with their own drop (2).
 4. A control round after every tally with a joined rank: who dropped the round is gone on (68).
 5. One follower for all optimizers: with sets {0, 2, 3} and {1, 2, 3}, 2 and 3 joined, each sees another tally first.
 6. Counts of calls go on after join(): ranks seem to drop in different calls (81). So counts begin anew. With one call that
    says nothing, as after a step: the last present rank may have made it before join() (5). So no call is free there.
 7. `failed` looked up at each tally: joined ranks follow into closed rounds, which then count (640). So once, in join();
    and again in the next join() while the own drop is not read, as later gradients may have come.
 8. An optimizer's end is forgotten when join() raises: a tally meets the control round of the end.
 9. Ended optimizers in the control round of the end: ranks have read different numbers of tallies.
10. No tally in a closed round while nobody is known to be away: with process sets deadlocks (2 of 500, with failures).

[Note: not modelled]
SyncBatchNorm, whose forward begins with an all-gather of its own; co2's averages; an optimizer wrapped
while some are away; a load_state_dict() after join() and before the next tally; calls between a join() that has raised and
the next one. With an order of reductions that several optimizers share (bytescheduler_adapter) the protocol is argued to
hold, not modelled: each optimizer has its own order, and no script waits for a reduction before its optimizer's tally.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import ClassVar

from overlap.core.tally import Call
from tests.overlap.core.channels_model import Channel, Waits
from tests.overlap.core.join_tally import JoinCalls, JoinHeard, JoinSaid, JoinVerdict, join_verdict
from tests.overlap.core.round_model import Failed, Kind, OptimizerEnded, Part

REPLAN, LOAD, BROKEN = 1, 2, 3  # calls that need every rank, and a join() that has failed


class CannotJoin(Exception):
    """On all ranks: nothing goes on until each has called join()."""


@dataclass
class Job:
    """One rank: what it shares between its optimizers."""

    rank: int
    meeting: Channel
    draw: random.Random
    breaking: float = 0.0
    process_sets: bool = False  # some optimizers of the job have other ranks than others
    parts: list[JoiningPart] = field(default_factory=list)
    joining: bool = False
    met: int | None = None  # its part of the meeting of all ranks that join() ends with
    failed: bool = False  # join() has failed, here or on a rank that this one needed

    def breaks(self) -> bool:
        """Whether something goes wrong now, on this rank alone, while it follows others."""
        return self.draw.random() < self.breaking

    def refuse(self, why: str) -> CannotJoin:
        self.failed = True
        return CannotJoin(why)

    def join(self) -> Waits[None]:
        """Take part in what others do, with nothing, until all have come here."""
        if self.met is None:
            self.met = self.meeting.post(self.rank, "join()")
        self.failed, self.joining = False, True
        try:
            for part in self.parts:
                part.join()
            groups = [
                [part for part in self.parts if part.ranks == ranks] for ranks in {p.ranks: 0 for p in self.parts}
            ]
            yield from together([self._follow(parts) for parts in groups])
            for part in self.parts:  # in the order in which all ranks have made them
                yield from part.end()
        finally:
            self.joining = False
        yield from self.meeting.read(self.met)
        self.met = None
        for part in self.parts:
            part.at_end = False

    def _follow(self, parts: list[JoiningPart]) -> Waits[None]:
        """Optimizers of the same ranks, which are all in the call of one of them when they wait for this rank."""
        while away := [part for part in parts if not part.at_end]:
            yield Pause(lambda away=away: any(part.answered for part in away))
            for part in [part for part in away if part.answered]:
                yield from part.follow()


class Pause:
    """Waits for tallies only: here a rank can leave join(), and go on in the next one."""

    def __init__(self, ripe: Callable[[], bool]) -> None:
        self._ripe = ripe

    def __call__(self) -> bool:
        return self._ripe()


def together(followers: list[Waits[None]]) -> Waits[None]:
    """All of them to their ends, or until one raises: then others come to their next pause first."""
    waits: dict[int, Callable[[], bool]] = dict.fromkeys(range(len(followers)), lambda: True)
    raised: Exception | None = None
    while waits:
        going = {n: ripe for n, ripe in waits.items() if raised is None or not isinstance(ripe, Pause)}
        if not going:
            break
        yield lambda going=going: any(ripe() for ripe in going.values())
        for number in [number for number, ripe in going.items() if ripe()]:
            try:
                waits[number] = next(followers[number])
            except StopIteration:
                del waits[number]
            except (CannotJoin, OptimizerEnded) as error:
                raised = raised or error
                del waits[number]
    if raised is not None:
        raise raised


class JoiningPart(Part):
    """One optimizer on one rank, with join()."""

    heard_type: ClassVar[type[JoinHeard]] = JoinHeard

    def __init__(self, job: Job, kind: Kind, data: Channel, call: Channel, gather: Channel) -> None:
        super().__init__(job.rank, job.draw, kind, data, call, gather)
        self.job = job
        self.calls: JoinCalls = JoinCalls()
        self.gone = self.at_end = False
        self.left = False  # gradients that nobody had stepped when this rank joined
        self.needs = 0  # of calls that are refused while some have joined, the one that the others are to hear of
        self.others_joined = 0  # in how many tallies, since all were there
        self.mine_joined = 0
        self.known = self.ranks  # those that had not joined in the last control round

    def _end_round(self) -> None:
        self.left = self.left and self.touched
        super()._end_round()

    @property
    def over(self) -> bool:
        return bool(self.ended) or self.gone

    @property
    def absent(self) -> bool:
        return self.present != self.ranks

    # - Calls of the script: [Note: present ranks]

    def meet(self, needs: int) -> Waits[None]:
        """What waits for all ranks, and needs all of them."""
        self._require_open()
        self.needs = needs
        yield from self._agree(Call.ASK)
        self.needs = 0

    def load(self, needs: int) -> None:
        """What needs every rank, and waits for nobody."""
        self._require_open()
        if self.known != self.ranks and self.said is None:
            self.needs = needs
            self._post(self._mine(Call.ASK))
            raise self.job.refuse("it needs every rank")

    def _close(self, what: str, *, again: bool = False, fails: bool = False) -> Waits[None]:
        yield from super()._close(what, again=again or self.absent or self.job.process_sets, fails=fails)

    def _step(self) -> Waits[None]:
        if self.synchronized and self.absent:
            yield from self.data.exchange(self.rank, "share")
        yield from super()._step()

    def _require_open(self) -> None:
        if self.job.failed:
            raise CannotJoin("join() has failed")
        super()._require_open()

    # - What all ranks do by what was said, joined ones too

    def _mine(self, call: Call) -> JoinSaid:
        joined = self.job.joining
        number = None if joined else self.calls.next
        alone = self.calls.alone and not joined
        return JoinSaid(call, self.round, self.rank, number, alone=alone, needs=self.needs)

    def _read(self) -> Waits[JoinHeard]:
        heard: JoinHeard = yield from super()._read()  # type: ignore[assignment]
        if heard.joined is not None and heard.last is not None:
            self.others_joined += 1
        return heard

    def _verdict(self, heard: JoinHeard) -> Enum:  # type: ignore[override]
        return join_verdict(heard)

    def _conclude(self, heard: JoinHeard, what: str | None, *, failed: bool) -> Waits[bool]:  # type: ignore[override]
        found = join_verdict(heard)
        if not isinstance(found, JoinVerdict):
            return (yield from super()._conclude(heard, what, failed=failed))
        yield from self._finish()
        if found is JoinVerdict.GONE:
            self.ended = found.name
            raise self.job.refuse("its optimizer is no more on a rank that has joined")
        assert found is JoinVerdict.REFUSED
        mine_was_heard, self.needs = bool(self.needs) and self.job.joining, 0
        if not mine_was_heard:
            raise self.job.refuse("it needs every rank")
        return False

    def _fail(self, failed: bool) -> Waits[None]:
        mine = ("join()" if self.job.joining else "check") if failed else None
        told = yield from self.call.exchange(self.rank, "texts", mine)
        if "join()" in told.values():
            raise self.job.refuse("a rank has gradients that nobody stepped")
        if not self.job.joining:
            raise Failed

    def _complete(self, heard: JoinHeard, what: str | None) -> Waits[None]:  # type: ignore[override]
        if heard.joined is not None:
            said = None if self.job.joining else (what, self.rate)
            told = yield from self.call.exchange(self.rank, "who, and what", said)
            present = tuple(rank for rank in self.ranks if told[rank] is not None)
            assert not self.closed or present == self.present, "nobody joins in a closed round"
            self.known = self.present = present
            self.told = told[present[0]]
            assert all(told[rank][0] == self.told[0] for rank in present), "the same call"
        yield from super()._complete(heard, what)

    def _await_void(self) -> Waits[None]:
        if not self.job.joining:  # else another rank that has joined may wait for this one elsewhere
            yield from super()._await_void()

    # - join(): [Note: joined ranks]

    def join(self) -> None:
        """This rank is out of data. Waits for nobody."""
        self.at_end = self.at_end or bool(self.ended)
        if self.said is None or self.dropping:
            self.left = self.touched or self.closed or bool(self.sent)
        if self.said is None and not self.at_end:
            self._post_joined()

    def _post_joined(self) -> None:
        mine = self._mine(Call.CLOSE)
        if self.gone:
            mine = replace(mine, gone=True, round=0)
        self._post(replace(mine, failed=self.left and not self.gone))
        self.mine_joined += 1

    def follow(self) -> Waits[None]:
        """Go on by what all ranks have said."""
        assert self.said is not None
        mine, _ = self.said
        if self.dropping:
            yield from self._hear(wait=False)
            self.at_end = bool(self.ended)
        else:
            heard = yield from self._read()
            if join_verdict(heard) is JoinVerdict.JOINED:
                self._end(heard)
                return
            closed = (yield from self._conclude(heard, None, failed=mine.failed)) and heard.closing is not None
            if closed:
                yield from self._act()
        if not self.at_end:
            self._post_joined()

    def _act(self) -> Waits[None]:
        """Do what those do that have not joined."""
        what, self.rate = self.told
        self.alike = False  # how many calls a step usually takes is learned from one's own
        yield from {
            "clip": self._clip,
            "synchronize": self._synchronize,
            "infinite": self._infinite,
            "step": self._step,
        }[what]()
        if self.job.breaks():
            self.needs = BROKEN
            self._post_joined()
            raise self.job.refuse("something of this rank's own has gone wrong")

    def _end(self, heard: JoinHeard) -> None:
        """All ranks have joined."""
        assert heard.first_round == heard.last_round or heard.gone is not None
        if heard.gone is not None:
            self.ended = "gone"
        self.calls.meet()
        self.at_end, self.needs = True, 0

    def end(self) -> Waits[None]:
        """All ranks have joined with all optimizers that are this rank's: the last ones' hyper-parameters are in force."""
        if self.ended:
            return
        yield from self._finish()
        if self.others_joined:
            mine = (self.mine_joined, self.rank, self.rate)
            told = yield from self.call.exchange(self.rank, "who was last", mine)
            self.rate = min(told.values())[2]
        self.others_joined = self.mine_joined = 0
        self.known = self.ranks
