"""Random scripts on a model of rounds: no order of events makes ranks wait for each other, or see different things."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.overlap.core.channels_model import Channel, Waits, run
from tests.overlap.core.join_model import LOAD, REPLAN, CannotJoin, Job, JoiningPart
from tests.overlap.core.round_model import Failed, Kind, OptimizerEnded, Part, StepSkipped, Update


@dataclass
class _Loop:
    """What a script does with one optimizer in each iteration, the same on all ranks."""

    ranks: tuple[int, ...]
    kind: Kind
    zero_first: bool
    twice: bool


_ENDS = ("step", "step", "clip step", "clip clip step", "synchronize step", "ask step", "fail step", "infinite")
_SKIPS = ("", "zero", "clip zero", "ask", "synchronize zero", "clip infinite")


def _calls(loop: _Loop, script: random.Random) -> list[str]:
    """Of one iteration."""
    zeros = ["zero"] * (1 + loop.twice)
    if loop.kind.early:
        skip = ["skip"] if script.random() < 0.2 else []
        return ["zero", "backward", *skip, script.choice(("step", "fail_step"))]
    end = script.choice(_ENDS if script.random() < 0.7 else _SKIPS)
    if not end.endswith("step") and not loop.zero_first and "zero" not in end:
        end = "step"
    after = [] if loop.zero_first or "zero" in end else ["zero"]
    return [*(zeros if loop.zero_first else ()), "backward", *end.replace("fail ", "fail_").split(), *after]


def _merged(lists: list[list[tuple[int, str]]], script: random.Random) -> Iterator[tuple[int, str]]:
    lists = [list(each) for each in lists if each]
    while lists:
        each = script.choice(lists)
        yield each.pop(0)
        lists = [each for each in lists if each]


class _World:
    """Ranks, their optimizers, and what they are to do. `rough` scripts make mistakes.

    Without `joins` all ranks have as many batches, and the model has the library's own tally.
    """

    def __init__(
        self,
        seed: int,
        *,
        joins: bool = True,
        rough: bool = False,
        early: float = 0.3,
        sets: tuple[tuple[int, ...], ...] = (),
    ) -> None:
        self.script = script = random.Random(seed)
        self.joins, self.early = joins, early
        self.size, self.rough = (4 if sets else 2 + seed % 3), rough
        everybody = tuple(range(self.size))
        self.loops = [
            self._loop(ranks) for ranks in sets or [self._ranks() for _ in range(script.choice((1, 2, 2, 3)))]
        ]
        meeting = Channel("meeting", everybody)
        breaking = 0.03 if rough and script.random() < 0.3 else 0.0
        process_sets = len({loop.ranks for loop in self.loops}) > 1
        self.jobs = {
            rank: Job(rank, meeting, random.Random(seed + rank), breaking=breaking, process_sets=process_sets)
            for rank in everybody
        }
        self.parts: dict[tuple[int, int], Part] = {}
        for number, loop in enumerate(self.loops):
            data, call, gather = (Channel(f"{name} {number}", loop.ranks) for name in ("data", "call", "gather"))
            for rank in loop.ranks:
                job = self.jobs[rank]
                if joins:
                    job.parts.append(JoiningPart(job, loop.kind, data, call, gather))
                    self.parts[number, rank] = job.parts[-1]
                else:
                    self.parts[number, rank] = Part(rank, job.draw, loop.kind, data, call, gather)
        self.amounts: list[list[int]] = []  # by phase: iterations of each rank, which joins after them
        self.batches: list[list[list[bool]]] = []  # by phase and iteration: which ranks have one
        self.phases = [self._phase() for _ in range(3)]
        if rough:  # one more, in which steps that were left half way are finished
            self.phases.append([])
            self.amounts.append([0] * self.size)
        self.caught = 0

    def _ranks(self) -> tuple[int, ...]:
        """All of them, or some."""
        some = sorted(self.script.sample(range(self.size), self.script.randint(1, self.size)))
        return tuple(range(self.size)) if self.script.random() < 0.6 else tuple(some)

    def _loop(self, ranks: tuple[int, ...]) -> _Loop:
        script = self.script
        early = script.random() < self.early
        kind = Kind(
            script.randint(1, 4) + early,
            sharded=early or script.random() < 0.5,
            early=early,
            deferred=not early and script.random() < 0.3,
            backward_first=early or script.random() < 0.8,
        )
        if kind.deferred:
            kind = Kind(kind.buckets, sharded=False, deferred=True)
        return _Loop(ranks, kind, zero_first=script.random() < 0.7, twice=script.random() < 0.2)

    def _phase(self) -> list[list[tuple[int, str]]]:
        """Calls by iteration: number of an optimizer, and what."""
        script = self.script
        iterations = []
        for _ in range(script.randint(0, 6)):
            each = [[(index, call) for call in _calls(loop, script)] for index, loop in enumerate(self.loops)]
            if self.rough and script.random() < 0.15:
                index = script.randrange(len(self.loops))
                if not self.loops[index].kind.early:
                    each[index].append((index, script.choice(("replan", "load"))))
            iterations.append(list(_merged(each, script)))
        least = 0 if self.joins else len(iterations)
        self.amounts.append([script.randint(least, len(iterations)) for _ in range(self.size)])
        self.batches.append([[script.random() < 0.7 for _ in range(self.size)] for _ in iterations])
        return iterations

    def value(self, phase: int, iteration: int, index: int, rank: int) -> dict[int, object]:
        """Gradients by bucket; not of all."""
        if not self.batches[phase][iteration][rank]:
            return {}
        use = random.Random(hash((phase, iteration, index, rank)))
        kind = self.loops[index].kind
        return {bucket: (rank, phase, iteration) for bucket in range(kind.buckets) if use.random() < 0.9}

    def train(self, rank: int) -> Waits[None]:
        for phase in range(len(self.phases)):
            yield from self._iterate(rank, phase)
        for part in [part for (_, owner), part in self.parts.items() if owner == rank]:
            if part.early is None:
                yield from part.zero_grad()
            yield from part.ask()

    def _iterate(self, rank: int, phase: int) -> Waits[None]:
        for iteration in range(self.amounts[phase][rank]):
            for index, call in self.phases[phase][iteration]:
                part = self.parts.get((index, rank))
                if part is not None and not part.over:
                    yield from self._do(part, call, phase, iteration, index)

    def train_and_join(self, rank: int) -> Waits[None]:
        job = self.jobs[rank]
        for phase in range(len(self.phases)):
            try:
                if self.rough and phase:
                    for part in job.parts:
                        if part.early is not None and not part.over:  # a step may have been left half way
                            yield from part.step()
                yield from self._iterate(rank, phase)
                yield from self._leave(job)
                yield from job.join()
            except (CannotJoin, OptimizerEnded) as error:
                yield from self._join_again(job, error)

    def _leave(self, job: Job) -> Waits[None]:
        """What scripts do before join(), where their last step may have been skipped; some forget it."""
        if self.rough and job.draw.random() < 0.3:
            return
        for part in job.parts:
            if not (part.kind.early or part.over):
                yield from part.zero_grad()
                part.gone = self.rough and job.draw.random() < 0.03

    def _join_again(self, job: Job, error: Exception) -> Waits[None]:
        while True:
            assert self.rough, error
            self.caught += 1
            try:
                yield from job.join()
                return
            except (CannotJoin, OptimizerEnded) as again:
                error = again

    def _do(self, part: Part, call: str, phase: int, iteration: int, index: int) -> Waits[None]:
        part.rate = (phase, iteration) if not self.rough else None
        if call == "backward":
            values = self.value(phase, iteration, index, part.rank)
            if values:
                yield from part.backward(values)
        elif call == "zero":
            yield from part.zero_grad()
        elif call == "skip":
            try:
                if not (part.learning or part.held_now):
                    yield from part.zero_grad()
            except StepSkipped:
                assert part.full
        elif call.startswith("fail"):
            try:
                yield from part.step(fails=part.rank == part.ranks[iteration % len(part.ranks)])
            except Failed:
                yield from part.step()
        elif call == "ask":
            some = yield from part.ask()
            present = [rank for rank in part.ranks if iteration < self.amounts[phase][rank]]
            given = any(self.value(phase, iteration, index, rank) for rank in present)
            assert some is given or self.rough
        elif call == "replan":
            assert isinstance(part, JoiningPart)
            yield from part.meet(REPLAN)
        elif call == "load":
            assert isinstance(part, JoiningPart)
            part.load(LOAD)
        else:
            yield from getattr(part, call)()

    def expected(self, index: int) -> list[list[Update]]:
        """Of each step of an optimizer, by bucket."""
        found = []
        loop = self.loops[index]
        for phase, iterations in enumerate(self.phases):
            for iteration, calls in enumerate(iterations):
                present = [rank for rank in loop.ranks if iteration < self.amounts[phase][rank]]
                if present and any(each == index and call in ("step", "fail_step") for each, call in calls):
                    values = {rank: self.value(phase, iteration, index, rank) for rank in present}
                    found.append(
                        [
                            Update(
                                tuple(sorted(v[bucket] for v in values.values() if bucket in v)),  # type: ignore[type-var]
                                len(present),
                                (phase, iteration),
                                used=any(bucket in v for v in values.values()),
                            )
                            for bucket in range(loop.kind.buckets)
                        ]
                    )
        return found

    def run(self) -> None:
        train = self.train_and_join if self.joins else self.train
        run({rank: train(rank) for rank in self.jobs}, self.script)
        for index, loop in enumerate(self.loops):
            mine = [self.parts[index, rank] for rank in loop.ranks]
            run({part.rank: part._arrive(list(part.in_transit)) for part in mine}, self.script)
            histories = [part.history for part in mine]
            assert all(history == histories[0] for history in histories), index
            if not self.rough:
                assert all(part.data.even and part.call.even and part.gather.even for part in mine)
                expected = self.expected(index)
                found = [histories[0][key] for key in sorted(histories[0])]
                assert found == [update for step in expected for update in step], index


@pytest.mark.parametrize(("joins", "early"), [(False, 0.3), (True, 0.3), (True, 1.0)])
@pytest.mark.parametrize("first", range(0, 300, 50))
def test_random_scripts_end_and_all_ranks_average_the_same(first: int, joins: bool, early: float) -> None:
    """With `early`, so many of the optimizers update parameters in backward."""
    for seed in range(first, first + 50):
        _World(seed, joins=joins, early=early).run()


@pytest.mark.parametrize("first", range(0, 300, 50))
def test_after_failures_all_ranks_come_back_from_join(first: int) -> None:
    caught = 0
    for seed in range(first, first + 50):
        world = _World(seed, rough=True)
        world.run()
        caught += world.caught
    assert caught > 20


@pytest.mark.parametrize("rough", [False, True])
def test_process_sets_that_share_ranks_go_on_at_the_same_time(rough: bool) -> None:
    """Ranks 2 and 3 may have joined while rank 0 closes a round of one optimizer, and rank 1 of another."""
    for seed in range(100):
        _World(seed, rough=rough, sets=((0, 2, 3), (1, 2, 3))).run()


@pytest.mark.parametrize("seed", [392, 1211, 1355])
def test_joined_ranks_do_not_wait_for_a_dropped_round(seed: int) -> None:
    """Rare: another rank that has joined is in another optimizer's act, and needs this one there."""
    _World(seed).run()
