"""What ranks conclude from a tally, and when a rank is in doubt; random scripts on a model of two channels."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field, replace

import pytest

from overlap.core.tally import Call, Calls, Heard, Said, Verdict, verdict


def heard(*said: Said) -> Heard:
    return Heard.of([int(max(column)) for column in zip(*(one.numbers() for one in said), strict=True)])


def close(rank: int, number: int | None, *, round: int = 3, **details: bool) -> Said:
    return Said(Call.CLOSE, round, rank, number, **details)


def drop(rank: int, number: int) -> Said:
    return Said(Call.DROP, 3, rank, number, sent=True)


def ask(rank: int, number: int) -> Said:
    return Said(Call.ASK, 3, rank, number)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ([close(0, 2, sent=True), close(1, 2, sent=True)], Verdict.AGREED),
        ([close(0, 2, sent=True), close(1, 3)], Verdict.AGREED),  # one was in doubt, for nothing
        ([close(0, 2, sent=True), close(1, None)], Verdict.AGREED),  # one has joined
        ([drop(0, 2), close(1, 3)], Verdict.DROPPED),
        ([drop(0, 2), drop(1, 2)], Verdict.DROPPED),
        ([drop(0, 2), close(1, None, sent=True)], Verdict.DROPPED),
        ([drop(0, 2), ask(1, 3)], Verdict.DROPPED),
        ([drop(0, 2), close(1, 3, failed=True)], Verdict.DROPPED),  # which says so again, of the next round
        ([drop(0, 2), close(1, 2)], Verdict.APART),  # steps in that very call
        ([drop(0, 1), close(1, 2, sent=True)], Verdict.APART),
        ([drop(0, 2), close(1, 1)], Verdict.APART),
        ([drop(0, 2), close(1, 3, sent=True)], Verdict.APART),  # has sent what the other takes for its part
        ([drop(0, 1), drop(1, 2)], Verdict.DROPPED),  # by the model's zero_grad() and the optimizer's
        ([drop(0, 2), drop(1, 3)], Verdict.APART),
        ([drop(0, 2), close(1, 3), close(2, 2, sent=True)], Verdict.APART),
        ([close(0, 3, alone=True), close(1, 2, sent=True)], Verdict.APART),  # skipped a step alone
        ([close(0, 3, alone=True), close(1, 3)], Verdict.AGREED),  # all skipped it, and nobody had sent anything
        ([close(0, 2), close(1, 2, failed=True)], Verdict.FAILED),
        ([close(0, 2), ask(1, 2)], Verdict.DIFFERENT_CALLS),
        ([close(0, 1, round=4), close(1, 1)], Verdict.DIFFERENT_CALLS),
    ],
)
def test_verdict(said: list[Said], expected: Verdict) -> None:
    assert verdict(heard(*said)) is expected


def test_what_any_rank_says_is_heard() -> None:
    found = heard(
        close(0, 2, sent=True, late=True), close(1, 4, converted=True), Said(Call.ASK, 3, 5, 3, gradients=True)
    )
    assert (found.gradients, found.late, found.converted, found.unconverted, found.failed) == (1, 1, 1, 1, 0)
    assert (found.first_round, found.last_round) == (3, 3)
    assert (found.asking, found.closing, found.dropping) == (5, 1, None)
    assert (found.drop, found.others, found.last, found.sent) == (None, 2, 4, True)
    assert not heard(drop(0, 2), close(1, 4)).sent
    assert not found.alike
    assert heard(close(0, 2), close(1, 2), close(2, None)).alike
    assert heard(drop(4, 2), close(1, 5)).dropping == 4
    assert heard(drop(4, 2), close(1, 5)).going_on == 1
    assert heard(close(4, 2, alone=True), close(1, 5)).dropping == 4


def test_one_call_after_a_step_is_free_and_none_after_a_drop() -> None:
    calls = Calls()
    calls.count()
    assert not calls.doubt
    calls.count()
    assert calls.doubt
    calls.drop()
    assert (calls.last, calls.doubt) == (0, False)
    calls.count()
    assert calls.doubt
    calls.step(alike=False)
    assert (calls.last, calls.doubt) == (0, False)


def _count(calls: Calls, times: int) -> None:
    for _ in range(times):
        calls.count()


def test_scripts_that_always_make_two_calls_are_learned() -> None:
    calls = Calls()
    for step in range(12):
        _count(calls, 2)
        assert calls.doubt is (step < 8)
        calls.step(alike=True)
    _count(calls, 3)
    assert calls.doubt
    calls.step(alike=True)
    _count(calls, 1)
    calls.step(alike=True)  # one step with less, and two say something again
    _count(calls, 2)
    assert calls.doubt


def test_what_only_those_with_gradients_count_comes_between_the_calls_of_all() -> None:
    dropping, empty = Calls(), Calls()
    for calls in (dropping, empty):
        calls.count()
    dropping.count(unseen=True)
    assert empty.last < dropping.last < empty.next


def test_gradients_that_were_dropped_alone_leave_a_doubt() -> None:
    calls = Calls()
    calls.drop_alone()
    assert calls.doubt
    calls.passed(0)
    assert not calls.doubt


# - A model: two channels, random scripts. Calls on `call` follow the script, reductions on `data` follow the plan.


class _Channel:
    """Operation k of every rank belongs together; each gives all values that ranks have brought."""

    def __init__(self, size: int) -> None:
        self._size, self._brought, self._next = size, [], [0] * size  # type: ignore[var-annotated]
        self._changed = threading.Condition()

    def post(self, rank: int, value: object) -> int:
        with self._changed:
            number = self._next[rank]
            self._next[rank] += 1
            while len(self._brought) <= number:
                self._brought.append({})
            self._brought[number][rank] = value
            self._changed.notify_all()
            return number

    def done(self, number: int) -> bool:
        with self._changed:
            return len(self._brought[number]) == self._size

    def read(self, number: int) -> list[object]:
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._brought[number]) == self._size, timeout=20):
                raise TimeoutError("a rank waits for another one")
            return list(self._brought[number].values())


@dataclass
class _Rank:
    """What `overlap.core.closing` does, with one bucket that is reduced in backward."""

    rank: int
    data: _Channel
    call: _Channel
    seen: list[object] = field(default_factory=list)
    calls: Calls = field(default_factory=Calls)
    round: int = 0  # in the first one there are no buckets yet
    gradient: object = None
    sent: int | None = None
    void: int | None = None  # the reduction of a round that this rank has dropped …
    posted: int | None = None  # … and what it has said of that

    def backward(self, value: object) -> None:
        self.gradient = value
        self._hear(wait=False)
        if self.round and self.posted is None and not self.calls.doubt:
            self.sent = self.data.post(self.rank, value)

    def zero_grad(self) -> None:
        self.calls.count()
        if self.sent is not None:
            self.posted = self.call.post(self.rank, Said(Call.DROP, self.round, self.rank, self.calls.last, sent=True))
            self.void, self.sent = self.sent, None
            self.calls.drop()
            self.round += 1
        elif self.gradient is not None:
            self.calls.drop_alone()
        self.gradient = None

    def synchronize(self) -> bool:
        """Whether any rank has a gradient."""
        return self._agree(Said(Call.ASK, 0, self.rank, 0, gradients=self.gradient is not None)).gradients

    def step(self, step: int, *, fails: bool = False) -> None:
        found = self._agree(Said(Call.CLOSE, 0, self.rank, 0, failed=fails))
        if verdict(found) is Verdict.FAILED:
            self.seen.append((step, "failed"))  # all raise, and the script tries again
            found = self._agree(Said(Call.CLOSE, 0, self.rank, 0))
        if self.sent is None:
            self.sent = self.data.post(self.rank, self.gradient)
        averaged = [value for value in self.data.read(self.sent) if value is not None]
        self.seen.append((step, sorted(averaged)))  # type: ignore[type-var]
        self.gradient = self.sent = None
        self.calls.step(found.alike)
        self.round += 1

    def _hear(self, *, wait: bool) -> None:
        if self.posted is not None and (wait or self.call.done(self.posted)):
            found = heard(*self.call.read(self.posted))  # type: ignore[arg-type]
            assert verdict(found) is Verdict.DROPPED, found
            assert self.void is not None
            self.data.read(self.void)
            self.posted = self.void = None

    def _agree(self, mine: Said) -> Heard:
        while True:
            self._hear(wait=True)
            closes = mine.call is Call.CLOSE
            if closes and self.round and self.sent is None and not self.calls.doubt:
                self.sent = self.data.post(self.rank, self.gradient)
            said = replace(mine, round=self.round, number=self.calls.next, sent=self.sent is not None)
            said = replace(said, alone=self.calls.alone)
            found = heard(*self.call.read(self.call.post(self.rank, said)))  # type: ignore[arg-type]
            if verdict(found) is not Verdict.DROPPED:
                assert verdict(found) in (Verdict.AGREED, Verdict.FAILED), found
                return found
            assert self.sent is None, "nothing is sent in doubt"
            assert found.drop is not None
            self.data.read(self.data.post(self.rank, None))
            self.calls.passed(found.drop)
            self.round += 1


def _run(seed: int) -> None:
    script = random.Random(seed)
    size, steps = 2 + seed % 3, 12
    has = [[script.random() < 0.6 for _ in range(size)] for _ in range(steps)]
    skips = [script.random() < 0.4 and step < steps - 1 for step in range(steps)]
    asks = [script.random() < 0.3 for _ in range(steps)]
    fails = [script.random() < 0.15 for _ in range(steps)]
    zero_first, twice = script.random() < 0.7, script.random() < 0.2
    data, call = _Channel(size), _Channel(size)
    ranks = [_Rank(rank, data, call) for rank in range(size)]
    errors: list[BaseException] = []

    def train(me: _Rank) -> None:
        try:
            for step in range(steps):
                for _ in range((1 + twice) if zero_first else 0):
                    me.zero_grad()
                if has[step][me.rank]:
                    me.backward((step, me.rank))
                if skips[step]:
                    me.zero_grad()
                    continue
                if asks[step]:
                    assert me.synchronize() is any(has[step])
                me.step(step, fails=fails[step] and me.rank == step % size)
                if not zero_first:
                    me.zero_grad()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=(me,), daemon=True) for me in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors, errors
    expected: list[object] = []
    for step in (step for step in range(steps) if not skips[step]):
        expected += [(step, "failed")] if fails[step] else []
        expected.append((step, [(step, rank) for rank in range(size) if has[step][rank]]))
    for me in ranks:
        assert me.seen == expected


@pytest.mark.parametrize("first", range(0, 300, 50))
def test_random_scripts_agree_without_a_deadlock(first: int) -> None:
    for seed in range(first, first + 50):
        _run(seed)
