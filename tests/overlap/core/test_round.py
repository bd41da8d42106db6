"""When reductions are issued, which a step takes before it waits, and what a round's gradients may become."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from overlap.core.bucket import Bucket, Phase, Slot
from overlap.core.participants import Participants
from overlap.core.round import Round, Stage
from overlap.plan.partition import BucketSpec
from overlap.plan.plan import BucketPlan

HOST: Any = SimpleNamespace(rank=0, size=1, streams=None, host_waits=True)


def _bucket(phase: Phase, done: bool | None) -> Any:
    bucket = SimpleNamespace(phase=phase, meets=True, work=None if done is None else SimpleNamespace(done=lambda: done))
    bucket.advance = lambda to: setattr(bucket, "phase", to)
    return bucket


def _round(order: list[Any], monkeypatch: pytest.MonkeyPatch, away: tuple[int, ...] = ()) -> tuple[Round, list[Any]]:
    settled: list[Any] = []
    planner: Any = SimpleNamespace(slots=[], order=order, shards=None)
    nothing: Any = SimpleNamespace(gradient_memory=SimpleNamespace(used=False))
    others: Any = SimpleNamespace(away=away)
    round = Round(
        planner, [HOST], nothing, nothing, nothing, others, (), passes=1, hold_last=True, ordered=True, deferred=False
    )
    monkeypatch.setattr(round, "reduced", settled.append)
    return round, settled


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ([(Phase.REDUCING, True), (Phase.REDUCING, True), (Phase.REDUCING, False)], [0, 1]),
        ([(Phase.REDUCING, True), (Phase.REDUCING, False), (Phase.REDUCING, True)], [0]),
        ([(Phase.GATHERING, None), (Phase.REDUCED, None), (Phase.REDUCING, True)], [2]),  # some were updated early
        ([(Phase.REDUCING, None), (Phase.REDUCING, True)], []),  # nothing on the wire that could be asked
    ],
)
def test_only_what_is_reduced_is_settled_in_order_of_issue(
    states: list[tuple[Phase, bool | None]], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    order = [_bucket(*state) for state in states]
    round, settled = _round(order, monkeypatch)
    round.settle_done()
    assert [order.index(bucket) for bucket in settled] == expected
    assert [order[number].phase for number in expected] == [Phase.REDUCED] * len(expected)


def test_nothing_is_settled_early_where_a_rank_has_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it could is known when all ranks have said their part."""
    round, settled = _round([_bucket(Phase.REDUCING, True)], monkeypatch, away=(1,))
    round.settle_done()
    assert not settled


def test_averages_do_not_become_local_again_before_the_round_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    round, _ = _round([], monkeypatch)
    with pytest.raises(RuntimeError, match="LOCAL cannot become SHOWN"):
        round.advance(Stage.SHOWN)
    round.advance(Stage.SETTLED)
    round.advance(Stage.SYNCHRONIZED)
    with pytest.raises(RuntimeError, match="SYNCHRONIZED cannot become SETTLED"):
        round.advance(Stage.SETTLED)
    round.reset()
    assert round.stage is Stage.LOCAL


def test_the_wire_is_quiet_with_one_reduction_under_way_and_not_with_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one issued may wait for a late rank; the one before it has the wire then."""
    done, going = (_bucket(Phase.REDUCING, state) for state in (True, False))
    for order, quiet in [([], True), ([going], True), ([done, going], True), ([going, going], False)]:
        round, _ = _round(order, monkeypatch)
        round._next = len(order)
        assert round.quiet is quiet


@pytest.mark.parametrize(("averages", "expected"), [(True, 2.0), (False, 1.0)])
def test_where_ranks_have_joined_averages_are_multiplied_and_sums_are_not(averages: bool, expected: float) -> None:
    planner: Any = SimpleNamespace(slots=[], order=[])
    exchange: Any = SimpleNamespace(averages=averages)
    others: Any = SimpleNamespace(factor=lambda number: 1.0 if number == 0 else 2.0)
    nothing: Any = SimpleNamespace(gradient_memory=SimpleNamespace(used=False))
    round = Round(
        planner, [HOST], exchange, nothing, nothing, others, (), passes=1, hold_last=True, ordered=True, deferred=False
    )
    assert (round.factor(0), round.factor(1), round.factor(0)) == (1.0, expected, 1.0)


class _Issued(list[int]):
    """Buckets by number, as their reductions are issued."""

    def reduce(self, _comm: Any, bucket: Bucket) -> None:
        self.append(bucket.index)


@pytest.mark.parametrize(
    ("ordered", "hold_last", "expected"),
    [
        (True, False, [[], [0], [0], [0, 1, 2]]),
        (True, True, [[], [0], [0], [0, 1]]),  # the last one is left to step()
        (False, False, [[2], [2, 0], [2, 0], [2, 0, 1]]),
    ],
)
def test_buckets_are_issued_when_they_are_full_and_in_the_agreed_order(
    ordered: bool, hold_last: bool, expected: list[list[int]]
) -> None:
    """Gradients come in another one. Bucket 1 has two parameters."""
    slots = [Slot(number, str(number), torch.nn.Parameter(torch.ones(2)), 0) for number in range(4)]
    issued: Any = _Issued()
    order = []
    for index, members in enumerate([(0,), (1, 3), (2,)]):
        spec = BucketSpec(members, tuple(range(0, 2 * len(members), 2)), 2 * len(members), 2 * len(members))
        mine = [slots[number] for number in members]
        order.append(Bucket(index, BucketPlan(spec), mine, rank=0, world_size=1, collectives=issued))
    planner: Any = SimpleNamespace(slots=slots, order=order)
    plain: Any = SimpleNamespace(plain=True)
    transit: Any = SimpleNamespace(pending={})
    unsharder: Any = SimpleNamespace(gradient_memory=SimpleNamespace(used=False))
    options = {"ordered": ordered, "hold_last": hold_last, "deferred": False, "passes": 1}
    round = Round(planner, [HOST], plain, transit, unsharder, Participants(HOST, [0]), (), **options)  # type: ignore[arg-type]
    round.begin(held=False)
    for number, so_far in zip((2, 0, 1, 3), expected, strict=True):
        slots[number].param.grad = torch.ones(2)
        round.grad_ready(slots[number])
        assert issued == so_far
