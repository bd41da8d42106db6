"""A model of the rounds of one optimizer on several ranks, on the library's own tally: what `overlap.core.closing` does.

It sends nothing, and computes nothing: what is modelled is who waits for whom, and what each rank takes the others to do.
What differs when ranks may have joined is in `join_model.py`.

call      tallies and control rounds: in the order of the script's calls
data      reductions of buckets, and what needs their results on all ranks: in the order of the plan
gather    updated parameters
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum
from random import Random
from typing import ClassVar

from overlap.core.tally import Call, Calls, Heard, Said, Verdict, verdict
from tests.overlap.core.channels_model import Channel, Waits, always, heard_of
from tests.overlap.core.early_model import Early


class OptimizerEnded(Exception):
    """Ranks have made different calls."""


class Failed(Exception):
    """A check has failed on some rank."""


class StepSkipped(Exception):
    pass


@dataclass(frozen=True)
class Kind:
    """What an optimizer is like."""

    buckets: int
    sharded: bool = True  # the last bucket waits for step(), and parameters are gathered
    early: bool = False
    deferred: bool = False
    backward_first: bool = True  # reductions are issued under backward at all


@dataclass(frozen=True)
class Update:
    """Of one bucket: what was averaged, over how many, and with which hyper-parameter; `used`, unless all left it alone."""

    gradients: tuple[object, ...]
    ranks: int
    rate: object
    used: bool = True


class Part:
    """One optimizer on one rank. `draw` decides what a rank decides alone."""

    heard_type: ClassVar[type[Heard]] = Heard

    def __init__(self, rank: int, draw: Random, kind: Kind, data: Channel, call: Channel, gather: Channel) -> None:
        self.rank, self.draw, self.kind = rank, draw, kind
        self.data, self.call, self.gather = data, call, gather
        self.ranks = data.ranks
        self.history: dict[tuple[int, int], Update] = {}
        self.rate: object = None
        self.calls, self.round, self.learning = Calls(), 0, True
        self.said: tuple[Said, int] | None = None  # posted, and not read
        self.ended = ""
        self.in_transit: dict[int, Callable[[], Waits[None]]] = {}
        self.void: list[int] = []  # reductions of a round that this rank has dropped
        self.gradients: dict[int, object] = {}  # that wait for the call
        self.touched = False
        self.early = Early(self) if kind.early else None
        self._reset()

    def _reset(self) -> None:
        self.sent: dict[int, int] = {}
        self.full: dict[int, object] = {}
        self.closed = self.synchronized = False
        self.unused: frozenset[int] = frozenset()  # buckets that no rank has a gradient for, once the round is closed
        self.present: tuple[int, ...] = self.ranks  # that contribute, as in `overlap.core.participants`

    def _end_round(self) -> None:
        self.round += 1
        self._reset()

    @property
    def over(self) -> bool:
        """Whether scripts make no calls on it any more."""
        return bool(self.ended)

    @property
    def answered(self) -> bool:
        """Whether all ranks have said their part of what this one has posted last."""
        return self.said is not None and self.call.done(self.said[1])

    @property
    def dropping(self) -> bool:
        return self.said is not None and self.said[0].call is Call.DROP

    @property
    def held_now(self) -> bool:
        """Whether gradients wait for the next call."""
        return self.dropping or self.calls.doubt or self.learning or not self.kind.backward_first

    # - Backward

    def backward(self, values: dict[int, object]) -> Waits[None]:
        """Gradients of some buckets."""
        self._require_open()
        yield from self._arrive(self.draw.sample(sorted(self.in_transit), len(self.in_transit) // 2))
        self.touched = True
        yield from self._hear(wait=False)
        if self.held_now:
            self.gradients = dict(values)
            return
        for bucket, value in values.items():
            yield always
            if self.early is not None:
                yield from self.early.poll(bucket)
            self.full[bucket] = value
            yield from self._send(held_back=1 if self.kind.sharded else 0)

    def _send(self, held_back: int = 0) -> Waits[None]:
        while (bucket := len(self.sent)) < self.kind.buckets - held_back and bucket in self.full:
            yield from self._arrive([bucket])
            self.sent[bucket] = self.data.post(self.rank, ("reduce", self.round, bucket), self.full[bucket])

    def _flush(self, *, empty: bool = False) -> Waits[None]:
        """Issue what is left, with the gradients that waited for it, or `empty`."""
        for bucket in range(self.kind.buckets):
            self.full.setdefault(bucket, None if empty else self.gradients.get(bucket))
        yield from self._send()

    def _arrive(self, buckets: Iterable[int]) -> Waits[None]:
        for bucket in [bucket for bucket in buckets if bucket in self.in_transit]:
            yield from self.in_transit.pop(bucket)()

    # - Calls of the script

    def zero_grad(self) -> Waits[None]:
        self.calls.count()
        yield from self._hear(wait=False)
        if self.closed or self.touched or self.sent:
            yield from self._drop()

    def _drop(self) -> Waits[None]:
        if self.early is not None and self.full:
            raise StepSkipped
        if self.closed or self.sent:
            closed, calls = self.closed, self.calls
            self._post(replace(self._mine(Call.DROP), number=calls.last, sent=True))
            yield from self._flush(empty=True)
            self.void = list(self.sent.values())
            self.calls.drop()
            if closed:
                yield from self._finish()
            self.touched = bool(self.gradients)  # what was sent is lost
            self._end_round()
        else:
            self.calls.alone = True
            self._reset()
        self.touched, self.gradients = False, {}

    def ask(self) -> Waits[bool]:
        """Whether any rank has gradients."""
        self._require_open()
        heard = yield from self._agree(Call.ASK, gradients=self.touched)
        return heard.gradients

    def clip(self) -> Waits[None]:
        yield from self._close("clip")
        yield from self._clip()

    def synchronize(self) -> Waits[None]:
        if (yield from self.ask()) and not self.synchronized:
            yield from self._close("synchronize")
            yield from self._synchronize()

    def infinite(self) -> Waits[None]:
        yield from self._close("infinite")
        yield from self._infinite()

    def step(self, *, fails: bool = False) -> Waits[None]:
        yield from self._close("step", again=True, fails=fails)
        yield from self._step()

    def _close(self, what: str, *, again: bool = False, fails: bool = False) -> Waits[None]:
        self._require_open()
        if not self.closed or again:
            heard = yield from self._agree(Call.CLOSE, what=what, failed=fails)
            self.alike = heard.alike

    def _agree(self, call: Call, *, what: str = "", **details: bool) -> Waits[Heard]:
        while True:
            yield from self._hear(wait=True)
            waits = self.closed or self.calls.doubt or self.learning
            closes = call is Call.CLOSE
            sent = bool(self.sent) or (closes and not waits)
            complete = closes and not self.closed and self._has_all
            self._post(replace(self._mine(call), sent=sent, complete=complete, **details))
            if closes and not waits:
                yield from self._flush()
            heard = yield from self._read()
            if (yield from self._conclude(heard, what if closes else None, failed=details.get("failed", False))):
                return heard

    # - What all ranks do by what was said

    def _conclude(self, heard: Heard, what: str | None, *, failed: bool) -> Waits[bool]:
        """Whether all mean this call; else it is to be made again. `what` closes the round, if it is not None."""
        found = self._verdict(heard)
        yield from self._finish()  # every rank has issued its part of an earlier round, before it said this
        if found is Verdict.DROPPED:
            assert heard.drop is not None
            if not self.closed:
                yield from self._flush(empty=True)
            self.void = list(self.sent.values())
            yield from self._await_void()
            self.touched = bool(self.gradients)  # what was sent is lost
            self._end_round()
            self.calls.passed(heard.drop)
            return False
        if found is Verdict.FAILED:
            yield from self._fail(failed)
            return False
        if found is not Verdict.AGREED:
            self.ended = found.name
            raise OptimizerEnded(f"{found}: {heard}")
        if heard.closing is not None:
            yield from self._complete(heard, what)
        return True

    def _verdict(self, heard: Heard) -> Enum:
        return verdict(heard)

    def _fail(self, failed: bool) -> Waits[None]:
        """Some rank raises, so all do; this one has `failed` itself."""
        yield from self.call.exchange(self.rank, "texts", "check" if failed else None)
        raise Failed

    @property
    def _has_all(self) -> bool:
        """Whether this rank has something for every bucket."""
        return all({**self.gradients, **self.full}.get(bucket) is not None for bucket in range(self.kind.buckets))

    def _complete(self, heard: Heard, what: str | None) -> Waits[None]:
        """All ranks close the round."""
        if not self.closed:
            self.learning = False
            yield from self._flush()
            if not heard.complete:
                mine = {bucket for bucket, value in self.full.items() if value is not None}
                found = yield from self.call.exchange(self.rank, "used", mine)
                self.unused = frozenset(range(self.kind.buckets)).difference(*found.values())
            self.closed = True
            self.gradients, self.touched = {}, False

    def _post(self, mine: Said) -> None:
        assert self.said is None, "what was posted last is read first"
        self.said = mine, self.call.post(self.rank, "tally", mine)

    def _mine(self, call: Call) -> Said:
        return Said(call, self.round, self.rank, self.calls.next, alone=self.calls.alone)

    def _read(self) -> Waits[Heard]:
        assert self.said is not None
        said = yield from self.call.read(self.said[1])
        self.said = None
        return heard_of(said.values(), self.heard_type)

    def _hear(self, *, wait: bool) -> Waits[None]:
        if self.dropping and (wait or self.answered):
            found = self._verdict((yield from self._read()))
            if found is not Verdict.DROPPED:
                self.ended = found.name
            else:
                yield from self._await_void()
        if wait:
            self._require_open()

    def _await_void(self) -> Waits[None]:
        """This rank has issued its part of a round that is dropped."""
        yield from self._finish()

    def _finish(self) -> Waits[None]:
        yield from self._await(self.void)
        self.void = []

    def _await(self, operations: Iterable[int]) -> Waits[None]:
        for number in list(operations):
            yield from self.data.read(number)

    def _require_open(self) -> None:
        if self.ended:
            raise OptimizerEnded(self.ended)

    # - Once a round is closed

    def average(self, bucket: int) -> Waits[Update]:
        """Of this round, whatever follows until it is read."""
        rate, present, number, used = self.rate, self.present, self.sent[bucket], bucket not in self.unused

        def read() -> Waits[Update]:
            found = yield from self.data.read(number)
            given = {rank: value for rank, value in found.items() if value is not None}
            assert set(given) <= set(present), f"{sorted(given)} have contributed, and {present} count"
            return Update(tuple(sorted(given.values())), len(present), rate, used)  # type: ignore[type-var]

        return read()

    def _clip(self) -> Waits[None]:
        yield from self._await(self.sent.values())
        yield from self.data.exchange(self.rank, "norm")

    def _synchronize(self) -> Waits[None]:
        for bucket in range(self.kind.buckets):
            yield from self.average(bucket)
        yield from self.data.exchange(self.rank, "gradients")
        self.synchronized = True

    def _infinite(self) -> Waits[None]:
        yield from self._await(self.sent.values())
        self.calls.step(alike=False)
        self._end_round()

    def _step(self) -> Waits[None]:
        first = set() if self.early is None else (yield from self.early.make_up())
        for bucket in reversed(range(self.kind.buckets)):
            if bucket not in first:
                yield from self.update(bucket)
        self.calls.step(self.alike)
        self._end_round()

    def update(self, bucket: int) -> Waits[None]:
        key, average = (self.round, bucket), self.average(bucket)

        def later() -> Waits[None]:
            self.history[key] = yield from average

        if self.kind.deferred:
            self.in_transit[bucket] = later
            return
        yield from later()
        if self.kind.sharded:
            number = self.gather.post(self.rank, key, self.history[key])

            def arrive() -> Waits[None]:
                found = yield from self.gather.read(number)
                assert len(set(found.values())) == 1, found

            self.in_transit[bucket] = arrive
