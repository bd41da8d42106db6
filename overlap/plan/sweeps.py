"""When whole parameters of freed buckets are gathered, and when they are freed again (pure).

A forward pass goes through the buckets in the order of their use, backward through the same in reverse, or, where some are
used several times, as a head is that has the weight of an embedding, in the order in which it needs them: each is a sweep.
Every sweep gathers every bucket, in its order, whether this rank needs it or not. So all ranks that make the same passes
issue the same gathers in the same order, also where one of them leaves modules out.

    forward    b0 b1 b2 b3 b4       ahead of their use, while there is room
    backward         b2 b1 b0       b4 and b3 are there still: the last ones of forward, which half of the room holds

A bucket may be gathered for backward within a group of ranks: after forward, each of them keeps a share of it for that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from enum import Enum, auto
from typing import NamedTuple

__all__ = ["Act", "Do", "Sweep", "Sweeps"]


class Sweep(Enum):
    """Which way a sweep goes."""

    FORWARD = auto()
    BACKWARD = auto()


class Act(Enum):
    """What is to be done with a bucket."""

    GATHER = auto()
    GATHER_IN_GROUP = auto()  # from the shares that RESHARD_IN_GROUP has left
    FREE = auto()  # whole or, where that is gone, the share
    RESHARD_IN_GROUP = auto()  # free it, and keep this rank's share among its group until it is gathered


class Do(NamedTuple):
    act: Act
    bucket: int


class _State(Enum):
    AHEAD = auto()  # gathered, and to be used
    USED = auto()  # used at this moment
    DONE = auto()  # not used any more in this pass, so it may be freed


class Sweeps:
    """Decides for buckets of `nbytes`, numbered in the order of their use in forward.

    Beside those that are used, so many bytes as there is `room` for may be whole at a time, or one larger bucket; more only
    where backward is going to use them once more. Beside these, buckets that `stay` are whole from forward to backward,
    those to gather `once` until the last backward pass of a step has used them, and those to `keep` until they have other
    values. Those `in_group` leave shares after forward, from which backward gathers them. `passed` tells whether a forward
    pass is past all uses of a bucket that it has left out. `backward`: the order in which backward first uses them; None:
    the reverse. Methods return what to do, in this order.
    """

    def __init__(
        self,
        nbytes: Sequence[int],
        room: int,
        passed: Callable[[int], bool] = lambda _bucket: False,
        stay: Collection[int] = (),
        keep: Collection[int] = (),
        in_group: Collection[int] = (),
        once: Collection[int] = (),
        backward: Sequence[int] | None = None,
    ) -> None:
        self._nbytes, self._room, self._passed, self._until_step = tuple(nbytes), room, passed, frozenset(keep)
        self._backward = tuple(range(len(nbytes)))[::-1] if backward is None else tuple(backward)
        self._always = self._until_step | frozenset(once) if once else self._until_step
        self._keep = self._always  # what this pass leaves there
        self._stay, self._in_group = frozenset(stay) | self._keep, frozenset(in_group).difference(once)
        self._whole = frozenset[int]()  # of those to keep, what is there, with the values in force, on all ranks
        self._there: dict[int, _State] = {}  # the longest there first
        self._used: set[int] = set()  # in forward, since the last update
        self._last = self._end_of_forward()
        self._kept = False  # those of `_last` are there, from a forward sweep of the values in force …
        self._resharded = False  # … and shares of those `in_group`, on all ranks …
        self._shares: dict[int, None] = {}  # … as on this one, but for what was used at its end
        self._sweep: Sweep | None = None
        self._from_shares = False  # this sweep gathers those `in_group` from their shares
        self._order: tuple[int, ...] = ()  # of this sweep
        self._next = 0  # place in it of what is gathered next
        self.begun = False  # a pass, since the last step: its start is not only gathered ahead
        self.owes_backward = False  # backward may follow on this forward pass, and has not: others may be in it
        self._start(Sweep.FORWARD)

    def _end_of_forward(self) -> frozenset[int]:
        found = list(self._stay)
        left = self._room // 2
        for bucket in self._backward:
            if bucket in self._stay:
                continue
            left -= self._nbytes[bucket]
            if left < 0:
                break
            found.append(bucket)
        return frozenset(found)

    @property
    def there(self) -> list[int]:
        """The buckets that are gathered or being gathered."""
        return list(self._there)

    # - What a rank does

    def forward(self, *, trains: bool) -> list[Do]:
        """A forward pass begins; `trains`: backward may follow.

        What the last one :attr:`owes_backward` comes first.
        """
        acts: list[Do] = []
        if self.begun:
            acts += [*self._end_pass(), *self._start(Sweep.FORWARD)]
        self.begun, self.owes_backward = True, trains
        return acts + self._ahead()

    def backward(self, *, last: bool = False) -> list[Do]:
        """A backward pass begins; `last`: the one that is done with what was gathered once. That is so on all ranks."""
        acts = [*self._finish(), *self._start(Sweep.BACKWARD)]
        if last:
            self._keep = self._until_step
        return acts + self._ahead()

    def backward_over(self) -> list[Do]:
        """Backward is over: nothing of it stays, but what is kept."""
        acts = self._finish()
        self._sweep, self._order, self._next = None, (), 0
        return acts

    def rest(self) -> list[Do]:
        """This rank uses nothing more in this pass."""
        return self._finish()

    def use(self, bucket: int) -> list[Do]:
        """The bucket is about to be read; it is there, or being gathered, when this is done."""
        acts: list[Do] = []
        if bucket not in self._there:
            if bucket not in self._order[self._next :]:  # freed, and used again: this pass goes through all once more
                sweep = self._sweep or Sweep.FORWARD
                acts += [*self._finish(), *self._start(sweep)]
                self.begun, self.owes_backward = True, sweep is Sweep.FORWARD
            while bucket not in self._there:
                self._leave_out()
                acts += self._gather()
        if self._sweep is Sweep.FORWARD:
            self._used.add(bucket)
        self._there[bucket] = _State.USED
        self._leave_out()
        return acts + self._ahead()

    def _leave_out(self) -> None:
        """What this pass has come past without using it, or backward need not use, is done with."""
        for bucket, state in self._there.items():
            left_out = self._passed(bucket) if self._sweep is Sweep.FORWARD else bucket not in self._used
            if state is _State.AHEAD and left_out:
                self._there[bucket] = _State.DONE

    def rests(self, bucket: int) -> None:
        """The bucket is not used at this moment, and is going to be once more in this pass."""
        if self._there.get(bucket) is _State.USED:
            self._there[bucket] = _State.AHEAD

    def done(self, bucket: int) -> list[Do]:
        """The bucket is not used any more in this pass."""
        if self._there.get(bucket) is _State.USED:
            del self._there[bucket]
            self._there[bucket] = _State.DONE  # the last one now
        return self._ahead()

    def next_step(self, *, ahead: bool = True) -> list[Do]:
        """Parameters have other values, after passes that are :meth:`over`: the next forward is gathered `ahead`."""
        return [*self._start(Sweep.FORWARD), *(self._ahead() if ahead else ())]

    def over(self) -> list[Do]:
        """All passes of a step are over on this rank. What the last one has left out, others may need: it comes first."""
        acts = self._end_pass() if self._sweep is not None and self.begun else []
        acts += self._free_all()
        self._sweep, self._order, self._next, self.begun = None, (), 0, True
        self._used.clear()
        return acts

    def replaced(self) -> list[Do]:
        """Between steps, parameters have other values, or are about to, on all ranks: nothing that is there is of use."""
        acts = self._finish() if self.begun else []
        return [*acts, *self._free_all(), *self._start(Sweep.FORWARD)]

    # - Sweeps

    def _end_pass(self) -> list[Do]:
        """Finish what has begun, and go through the backward pass that it owes."""
        both = self.owes_backward
        return [*self._finish(), *((*self._start(Sweep.BACKWARD), *self._finish()) if both else ())]

    def _start(self, sweep: Sweep) -> list[Do]:
        order = tuple(range(len(self._nbytes))) if sweep is Sweep.FORWARD else self._backward
        there = (self._last if self._kept else frozenset()) | self._whole
        if sweep is Sweep.FORWARD:
            self._keep = self._always
        self._order = tuple(bucket for bucket in order if bucket not in there)
        self._from_shares = sweep is Sweep.BACKWARD and self._resharded
        self._sweep, self._next, self.begun, self.owes_backward = sweep, 0, sweep is not Sweep.FORWARD, False
        self._there.update({bucket: _State.AHEAD for bucket, state in self._there.items() if state is _State.DONE})
        return []

    def _finish(self) -> list[Do]:
        """Gather the rest of this sweep, which other ranks may wait for. What the next one needs stays."""
        acts: list[Do] = []
        if self._sweep is None:
            return acts
        stay = self._last if self._sweep is Sweep.FORWARD else self._keep
        while self._next < len(self._order):
            bucket = self._order[self._next]
            acts += self._gather()
            if bucket not in stay and self._there[bucket] is not _State.USED:
                acts.append(self._free(bucket))
        self._kept, self._whole = self._sweep is Sweep.FORWARD, self._keep
        self._resharded = self.owes_backward
        acts += [self._free(each) for each in self.there if each not in stay and self._there[each] is not _State.USED]
        return acts

    def _ahead(self) -> list[Do]:
        acts: list[Do] = []
        while self._next < len(self._order):
            freed, fits = self._make_room(self._nbytes[self._order[self._next]])
            acts += freed
            if not fits:
                return acts
            acts += self._gather()
        if self._always is not self._until_step and self._sweep is Sweep.BACKWARD:  # what was gathered once goes now
            acts += self._make_room(0)[0]
        return acts

    def _gather(self) -> list[Do]:
        bucket = self._order[self._next]
        acts, _ = self._make_room(self._nbytes[bucket])
        self._next += 1
        if bucket not in self._there:  # else it is used at this moment; the others may need it all the same
            self._there[bucket] = _State.AHEAD
        self._shares.pop(bucket, None)
        from_shares = self._from_shares and bucket in self._in_group
        return [*acts, Do(Act.GATHER_IN_GROUP if from_shares else Act.GATHER, bucket)]

    def _make_room(self, nbytes: int) -> tuple[list[Do], bool]:
        """Free what is done with, until so many more bytes fit; and whether they do."""
        acts: list[Do] = []
        taken = sum(self._nbytes[each] for each, state in self._there.items() if self._counts(each, state))
        left = max(0, self._room - nbytes)
        for each in [each for each, state in self._there.items() if state is _State.DONE]:
            if taken <= left:
                break
            if each not in self._keep and (self._sweep is Sweep.BACKWARD or each not in self._last):
                acts.append(self._free(each))
                taken -= self._nbytes[each]
        return acts, taken <= left

    def _counts(self, bucket: int, state: _State) -> bool:
        """Whether a bucket takes from the room. One that stays does not, until backward is done with it."""
        if bucket in self._keep:
            return False
        if bucket in self._stay and (self._sweep is Sweep.FORWARD or state is _State.AHEAD):
            return False
        return state is not _State.USED

    def _free(self, bucket: int) -> Do:
        del self._there[bucket]
        if bucket in self._in_group and self.owes_backward:
            self._shares[bucket] = None
            return Do(Act.RESHARD_IN_GROUP, bucket)
        return Do(Act.FREE, bucket)

    def _free_all(self) -> list[Do]:
        acts = [Do(Act.FREE, bucket) for bucket in (*self._there, *self._shares)]
        self._there.clear()
        self._shares.clear()
        self._kept = self._resharded = False
        self._whole = frozenset()
        return acts
