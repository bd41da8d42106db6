"""join() in the model: a rank out of data takes part in the others' rounds with nothing, and is told of them in tallies.

It posts its part of one tally on each of its optimizers, and goes on with whichever the others have answered.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from overlap.core.tally import Call, Heard, Verdict, verdict
from tests.overlap.core.channels_model import Channel, Waits
from tests.overlap.core.round_model import CannotJoin, OptimizerEnded, Part

REPLAN, LOAD, BROKEN = 1, 2, 3  # calls that need every rank, and a join() that has failed


@dataclass
class Job:
    """One rank: what it shares between its optimizers."""

    rank: int
    meeting: Channel
    draw: random.Random
    breaking: float = 0.0
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

    def join(self) -> None:
        """This rank is out of data. Waits for nobody."""
        self.at_end = self.at_end or bool(self.ended)
        if self.said is None or self.dropping:
            self.left = self.touched or self.closed or bool(self.sent)
        if self.said is None and not self.at_end:
            self._post_joined()

    def _post_joined(self) -> None:
        self._post(replace(self._mine(Call.CLOSE), failed=self.left and not self.gone, gone=self.gone))
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
            if verdict(heard) is Verdict.JOINED:
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

    def _end(self, heard: Heard) -> None:
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
