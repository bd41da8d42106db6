"""One small all-reduce of numbers by which the ranks of an optimizer agree what to do in a call that all make.

Whether a rank takes part in a round must not hang on what that rank alone knows: it may have had no batch, have thawed
another layer than the others, or have failed. So in every call that ends a round, each rank says what it knows, and all go
on by the largest of what was said, which is the same everywhere. These all-reduces have a communicator of their own. There
operations follow the script's calls; on those that carry buckets they follow the plan.

[Note: who drops a round]
A script skips a step with ``zero_grad()``. A rank whose gradients are on their way drops them there: it says so, issues
the rest of its part, and waits for nothing. A rank that had no gradient sees nothing to drop. It learns of the drop in its
next call, where its tally is the one that the others' drop belongs to; it completes its part of that round, and asks again.

Which call that was, they tell by counting: all ranks run the same script, so they make the same calls. Who has passed the
call with nothing on its way goes on; who has sent something for that round, or is not past it, means another round than
those that dropped it, and all raise. A rank that drops gradients of which nothing is on its way says so in its next tally:
it may be the only one to skip that step.

[Note: doubt]
So a rank must send nothing while an earlier call may have dropped the round. One ``zero_grad()`` after a step says
nothing; a second one may have been a skip. Then gradients wait for the tally of ``step()``. How many calls say nothing is
learned from the last steps, since some scripts always make two.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch

from overlap.core.alike import Spread, said_alike
from overlap.transport.communicator import Communicator, ReduceOp, Work
from overlap.transport.operation import all_reduce

__all__ = ["Call", "Calls", "Heard", "Said", "Tally", "Verdict", "verdict", "why_ended"]

_NOBODY = -(2**62)  # in place of a number that no rank has given
_REMEMBERED = 8  # steps


class Call(Enum):
    """The kind of call in which a rank says something."""

    ASK = auto()  # synchronize(), or a closure: does any rank have gradients?
    CLOSE = auto()  # reductions of the round are needed
    DROP = auto()  # they are not


@dataclass(frozen=True, slots=True)
class Said:
    """What `rank` says in its call number `number` of round `round`.

    One that has joined follows the others and gives none.
    """

    call: Call
    round: int
    rank: int
    number: int | None
    sent: bool = False  # reductions of this round are on their way from here, or will be without waiting
    gradients: bool = False  # there are some that no step has used
    late: bool = False  # a parameter that is in no bucket takes part
    converted: bool = False  # parameters have become another type
    failed: bool = False  # this rank raises
    news: bool = False  # a feature has something to agree on
    complete: bool = False  # every parameter of a bucket has a gradient here
    passed: bool = False  # it has made a pass since an optimizer of the model was updated
    alone: bool = False  # it has dropped gradients in this round of which it had sent nothing
    digest: int | None = None  # of what has to be the same on all ranks that step; at least 0
    clipped: float = 0.0  # what this rank clips by, or what is in it beside gradients of this optimizer
    scale: float = 0.0  # by which a GradScaler has multiplied this rank's loss

    def numbers(self) -> list[int]:
        """The numbers that are reduced by their maximum; :meth:`Heard.of` reads them."""
        call, number, rank = self.call, self.number, self.rank
        dropping = call is Call.DROP
        return [
            self.gradients,
            self.late,
            self.converted,
            not self.converted,
            self.failed,
            self.sent and not dropping and number is not None,
            self.news,
            self.complete,
            self.passed,
            self.round,
            -self.round,
            rank if call is Call.ASK and number is not None else _NOBODY,
            rank if call is Call.CLOSE and number is not None else _NOBODY,
            rank if dropping or self.alone else _NOBODY,
            _NOBODY if dropping or self.alone or number is None else rank,
            _NOBODY if number is None or not dropping else -number,
            _NOBODY if number is None or dropping else -number,
            _NOBODY if number is None else number,
            _NOBODY if number is None or not dropping else number,
            _NOBODY if self.digest is None else self.digest,
            _NOBODY if self.digest is None else -self.digest,
            *((_NOBODY, _NOBODY) if number is None else said_alike(self.clipped) if self.clipped else (0, 0)),
            *((_NOBODY, _NOBODY) if number is None else said_alike(self.scale) if self.scale else (0, 0)),
        ]


@dataclass(frozen=True, slots=True)
class Heard:
    """What all ranks have said, combined. A number that nobody gave is None."""

    gradients: bool
    late: bool
    converted: bool  # on some rank …
    unconverted: bool  # … and not on some
    failed: bool
    sent: bool  # by a rank that does not drop the round
    news: bool
    complete: bool  # some rank is, so every parameter was used
    passed: bool  # some rank has
    last_round: int
    first_round: int
    asking: int | None  # one of the ranks that ask …
    closing: int | None
    dropping: int | None  # … that drop gradients of this round, or have done so before they sent any …
    going_on: int | None  # … and that do not
    drop: int | None  # the first call in which a rank drops the round
    others: int | None  # the first call of those that do not
    last: int | None  # the last call of any
    last_drop: int | None
    unlike: bool  # what has to be the same is not
    clipped: Spread | None  # of what ranks clip by, where it is not the same on all; None where it is …
    scale: Spread | None  # … and of the scales of their losses

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Heard:
        """What was said, from the maxima of :meth:`Said.numbers`."""
        flags, (last_round, minus_first), given = map(bool, numbers[:9]), numbers[9:11], numbers[11:-4]
        gradients, late, converted, unconverted, failed, sent, news, complete, passed = flags
        said = [None if number == _NOBODY else number for number in given]
        asking, closing, dropping, going_on, drop, others, last, last_drop, greatest, least = said
        clipped, scale = (Spread.of(*both) if sum(both) > 0 else None for both in (numbers[-4:-2], numbers[-2:]))
        return cls(
            *(gradients, late, converted, unconverted, failed, sent, news, complete, passed),
            *(last_round, -minus_first, asking, closing, dropping, going_on),
            *(drop if drop is None else -drop, others if others is None else -others, last, last_drop),
            unlike=greatest is not None and least is not None and greatest != -least,
            clipped=clipped,
            scale=scale,
        )

    @property
    def alike(self) -> bool:
        """Whether all ranks have made as many calls before this one."""
        return self.others is not None and self.others == self.last


class Verdict(Enum):
    """The decision that all ranks follow next."""

    AGREED = auto()
    DROPPED = auto()  # the round is void: who did not drop it completes it, and calls again
    FAILED = auto()  # some rank raises, so all do
    UNLIKE = auto()  # ranks are about to step with different hyper-parameters, say: all raise
    APART = auto()  # some drop the round, and others mean it
    DIFFERENT_CALLS = auto()


def verdict(heard: Heard) -> Verdict:
    """The decision from what was heard, the same on all ranks. Pure."""
    if heard.first_round != heard.last_round:
        return Verdict.DIFFERENT_CALLS
    if heard.drop is not None:
        assert heard.last_drop is not None
        passed = heard.others is None or heard.others > heard.drop
        together = (heard.drop + 1) // 2 == (heard.last_drop + 1) // 2  # by the optimizer's zero_grad() or the model's
        return Verdict.DROPPED if passed and together and not heard.sent else Verdict.APART
    if heard.asking is not None and heard.closing is not None:
        return Verdict.DIFFERENT_CALLS
    if heard.dropping is not None and not heard.alike:
        return Verdict.APART
    if heard.failed:
        return Verdict.FAILED
    return Verdict.UNLIKE if heard.unlike else Verdict.AGREED


def why_ended(found: Verdict, heard: Heard, ranks: Sequence[int]) -> str:
    """The reason why ranks that came to `found` cannot go on, as text. Pure."""
    first, last = heard.first_round, heard.last_round
    if found is Verdict.APART and heard.others is not None:
        return (
            f"rank {heard.dropping} has dropped the gradients of step {first} (zero_grad() before step()), and rank "
            f"{heard.going_on} goes on with them; skip a step on every rank, or on none, by optimizer.zero_grad() "
            "where some rank may have had no batch"
        )
    if found is Verdict.APART:
        return (
            f"ranks {list(ranks)} have dropped the gradients of step {first} in different calls; call "
            "optimizer.zero_grad() on every rank alike"
        )
    if first != last:
        return (
            f"ranks {list(ranks)} have made different calls: some of them close step {first}, and others step {last}; "
            "synchronize(), clip_grad_norm_() and step() are called on every rank alike"
        )
    return (
        f"ranks {list(ranks)} have made different calls in step {first}: rank {heard.asking} asks whether there are "
        f"gradients (synchronize(), or a step with a closure), and rank {heard.closing} needs them (step(), clipping); "
        "make the same calls on every rank"
    )


class Calls:
    """Counts the calls that this rank has made since its round began. Pure.

    Each counts two. What only those count that had gradients in hand (the model's ``zero_grad()``) counts one.
    """

    def __init__(self) -> None:
        self._made = 0  # calls in which a round can be dropped
        self._free = 2  # so many say nothing about an earlier drop
        self.alone = False  # this rank has dropped gradients of which it had sent nothing
        self._usual: deque[int] = deque(maxlen=_REMEMBERED)

    @property
    def doubt(self) -> bool:
        """Whether a call that this rank has passed may have ended the round for others: [Note: doubt]."""
        return self.alone or self._made > self._free

    @property
    def last(self) -> int:
        """The number of the call that was counted last."""
        return self._made

    @property
    def next(self) -> int:
        """The number of a call that is not counted here, such as ``step()``."""
        return self._made + 2

    def count(self, *, unseen: bool = False) -> None:
        """Count a call that drops gradients, if there are any; `unseen` by ranks that have none."""
        self._made += 1 if unseen else 2

    def drop(self) -> None:
        """Begin the next round: this rank drops the current one in the call that was counted last."""
        self._made, self.alone = 0, False
        self._free = max(0, self._free - 2)

    def passed(self, drop: int) -> None:
        """Follow the others, which have dropped the round in their call `drop`."""
        self._made -= drop
        self.alone = False
        self._free = self._least - 2

    def step(self, alike: bool) -> None:
        """End the round in a step; `alike` if all ranks came to it after as many calls."""
        if alike:
            self._usual.append(self._made)
        self._made, self.alone, self._free = 0, False, self._least

    @property
    def _least(self) -> int:
        """Of the last steps; fewer may all have been unusual."""
        return max(2, min(self._usual)) if len(self._usual) == _REMEMBERED else 2


class Tally:
    """Tallies among all ranks of `comm`, one after the other."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._said: Said | None = None
        self._under_way: tuple[torch.Tensor, Work | None] | None = None  # without an operation on a rank alone

    @property
    def dropping(self) -> bool:
        """Whether this rank has posted that it drops its round, and has not read the others' answers yet."""
        return self._said is not None and self._said.call is Call.DROP

    @property
    def done(self) -> bool:
        """Whether every rank has posted its part of the last tally."""
        return self._under_way is not None and (self._under_way[1] is None or self._under_way[1].done())

    def post(self, mine: Said, label: str) -> None:
        """Post what this rank says, without waiting.

        `label` is what a report calls the operation: what the script has called.
        """
        assert self._said is None, "what was posted last is read first"
        numbers = torch.tensor(mine.numbers(), dtype=torch.int64, device="cpu")
        self._said, self._under_way = mine, (numbers, None)
        if self._comm.size == 1:
            return
        found = torch.empty_like(numbers)
        self._under_way = found, self._comm.start(all_reduce(numbers, found, ReduceOp.MAX, label=label))

    def read(self) -> Heard:
        """Wait for every rank, and return what they have said."""
        assert self._under_way is not None, "it was posted"
        found, work = self._under_way
        if work is not None:
            work.wait()
        self._said = self._under_way = None
        return Heard.of(found.tolist())
