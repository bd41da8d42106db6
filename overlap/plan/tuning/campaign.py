"""The course of one tuning: start, trials, the start against the best, verdict. Decides; measures nothing (pure).

start ─▶ trial ─▶ … ─▶ trial ─▶ start, best, best, start, start, best ─▶ the best if it won, else the start
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from overlap.plan.tuning.space import Setting, describe

__all__ = ["Campaign", "Decision", "Measurement", "Result", "Search", "table"]

_REPEATS = 8  # how many proposals in a row may lead to buckets that were measured already


class Search(Protocol):
    """A search: it proposes settings and is told what they cost."""

    def ask(self) -> dict[str, float]: ...

    def tell(self, setting: Setting, seconds: float) -> None: ...


@dataclass(frozen=True, slots=True)
class Measurement:
    setting: Setting
    seconds: float  # of one step
    phase: str  # "start", "trial", "start again", "best again"


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of a tuning.

    `ratio`: seconds of the best over those of the start, the median of the pairs; 1 if they are one.
    """

    setting: Setting
    seconds: float
    start: Setting
    start_seconds: float
    ratio: float
    reverted: bool  # the best trial did not win when it was measured again, so the start stays


@dataclass(frozen=True, slots=True)
class Decision:
    """The setting from the next step on, with a `result` when there is nothing left to measure."""

    setting: Setting
    result: Result | None = None


class Campaign:
    """The course of one tuning: given each measurement of the current setting, it answers with the next one.

    `same` maps a setting to what it leads to (the buckets): settings that lead to the same are measured once.
    """

    def __init__(
        self,
        search: Search,
        start: Setting,
        *,
        trials: int,
        pairs: int,
        same: Callable[[Setting], Hashable] = lambda setting: tuple(sorted(setting.items())),
    ) -> None:
        self.log: list[Measurement] = []
        self._search, self._start, self._trials, self._pairs, self._same = search, start, trials, pairs, same
        self._course = self._run()
        next(self._course)

    def next(self, seconds: float) -> Decision:
        """The next decision, after a step that took so many `seconds` with the last decision's setting."""
        try:
            return Decision(self._course.send(seconds))
        except StopIteration as end:
            result: Result = end.value
            return Decision(result.setting, result)

    def _run(self) -> Generator[Setting, float, Result]:
        known: dict[Hashable, float] = {}
        proposal: Setting | None = self._start
        while proposal is not None:
            seconds = yield from self._measure(proposal, "trial" if self.log else "start")
            known[self._same(proposal)] = seconds
            self._search.tell(proposal, seconds)
            proposal = self._propose(known) if len(self.log) < self._trials else None
        first, best = self.log[0], min(self.log, key=lambda one: one.seconds)
        if best is first:
            return Result(self._start, first.seconds, self._start, first.seconds, 1.0, False)
        return (yield from self._compare(best.setting))

    def _measure(self, setting: Setting, phase: str) -> Generator[Setting, float, float]:
        seconds = yield setting
        self.log.append(Measurement(setting, seconds, phase))
        return seconds

    def _propose(self, known: Mapping[Hashable, float]) -> Setting | None:
        for _ in range(_REPEATS):
            proposal = self._search.ask()
            seconds = known.get(self._same(proposal))
            if seconds is None:
                return proposal
            self._search.tell(proposal, seconds)
        return None

    def _compare(self, best: Setting) -> Generator[Setting, float, Result]:
        old, new = [], []
        for number in range(self._pairs):
            for turn in (0, 1) if number % 2 == 0 else (1, 0):  # so that a drift does not favour one of them
                if turn == 0:
                    old.append((yield from self._measure(self._start, "start again")))
                else:
                    new.append((yield from self._measure(best, "best again")))
        ratio = statistics.median(mine / theirs for mine, theirs in zip(new, old, strict=True))
        reverted = ratio >= 1
        setting, seconds = (self._start, old) if reverted else (best, new)
        return Result(setting, statistics.median(seconds), self._start, statistics.median(old), ratio, reverted)


def table(log: Sequence[Measurement], result: Result) -> str:
    """The whole course as a table: a line for each measurement, times in ms."""
    width = max(len(describe(one.setting)) for one in log)
    lines = [f"{'':11} {'setting':{width}} {'ms/step':>10}"]
    lines += [f"{one.phase:11} {describe(one.setting):{width}} {one.seconds * 1e3:10.3f}" for one in log]
    if result.reverted:
        verdict = f"the start stays: measured again, the best trial took {result.ratio:.3f} of its time"
    elif result.setting == result.start:
        verdict = "the start stays: no trial was faster"
    else:
        verdict = f"{describe(result.setting)} stays: measured again, it took {result.ratio:.3f} of the start's time"
    return "\n".join([*lines, verdict])
