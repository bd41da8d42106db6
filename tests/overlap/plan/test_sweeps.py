"""Which buckets are gathered when: the same series on all ranks, whatever they leave out; there when used; within room."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence

import pytest

from overlap.plan.sweeps import Act, Do, Sweeps

BYTES = 10


class _Rank:
    """Carries acts out: what was gathered in all (``~bucket``: in a group), what is there or shared, and the most there."""

    def __init__(
        self,
        buckets: int,
        room: int,
        stay: Collection[int] = (),
        keep: Collection[int] = (),
        in_group: Collection[int] = (),
        once: Collection[int] = (),
        backward: Sequence[int] | None = None,
    ) -> None:
        self.now = -1  # the bucket that this pass has come to
        self.sweeps = Sweeps(
            [BYTES] * buckets, room, lambda bucket: bucket < self.now, stay, keep, in_group, once, backward
        )
        self.keep, self.once = set(keep), set(once)
        self.gathered: list[int] = []
        self.there: set[int] = set()
        self.shared: set[int] = set()
        self.most = 0

    def do(self, acts: list[Do]) -> None:
        for act, bucket in acts:
            if act is Act.GATHER or act is Act.GATHER_IN_GROUP:
                if act is Act.GATHER_IN_GROUP:
                    assert bucket in self.shared | self.there, "this rank has no share to give"
                self.gathered.append(bucket if act is Act.GATHER else ~bucket)
                self.there.add(bucket)
                self.shared.discard(bucket)
                self.most = max(self.most, BYTES * len(self.there))
            elif act is Act.RESHARD_IN_GROUP:
                self.there.remove(bucket)
                self.shared.add(bucket)
            else:
                (self.there if bucket in self.there else self.shared).remove(bucket)
        assert self.there == set(self.sweeps.there)

    def use(self, bucket: int) -> None:
        self.do(self.sweeps.use(bucket))
        assert bucket in self.there

    def forward(self, buckets: list[int], *, trains: bool = True) -> None:
        self.now = -1
        self.do(self.sweeps.forward(trains=trains))
        for bucket in buckets:
            self.now = bucket
            self.use(bucket)
            self.do(self.sweeps.done(bucket))

    def backward(self, buckets: list[int], *, last: bool = True) -> None:
        self.do(self.sweeps.backward(last=last))
        for bucket in reversed(buckets):
            self.use(bucket)
            self.do(self.sweeps.done(bucket))
        self.do(self.sweeps.backward_over())
        assert self.there == (self.keep if last else self.keep | self.once)
        assert not self.shared

    def update(self) -> None:
        if not self.sweeps.begun:  # others may have made a pass
            self.do(self.sweeps.forward(trains=True))
        self.do(self.sweeps.over())
        assert not self.shared
        self.do(self.sweeps.next_step())


def test_a_step_gathers_ahead_within_room_and_keeps_the_end_of_forward_for_backward() -> None:
    rank = _Rank(6, 4 * BYTES)
    rank.forward([0, 1, 2, 3, 4, 5])
    assert rank.gathered == [0, 1, 2, 3, 4, 5]
    assert {4, 5} <= rank.there
    rank.backward([0, 1, 2, 3, 4, 5])
    assert rank.gathered == [0, 1, 2, 3, 4, 5, 3, 2, 1, 0]
    assert rank.most == (1 + 4) * BYTES  # one that is used, four beside it
    rank.update()
    assert rank.gathered[10:] == [0, 1, 2, 3]  # ahead of the next forward
    rank.forward([0, 1, 2, 3, 4, 5])
    assert rank.gathered[10:] == [0, 1, 2, 3, 4, 5]


def test_buckets_that_stay_are_gathered_once_for_both_passes() -> None:
    rank = _Rank(6, 2 * BYTES, stay=(0, 3))
    for _ in range(2):
        rank.forward([0, 1, 2, 3, 4, 5])
        assert {0, 3} <= rank.there
        rank.backward([0, 1, 2, 3, 4, 5])
        rank.update()
    assert rank.gathered[:6] == [0, 1, 2, 3, 4, 5]
    assert rank.gathered[6:9] == [4, 2, 1]  # backward; 5 was there still
    assert rank.gathered[9:18] == [0, 1, 2, 3, 4, 5, 4, 2, 1]
    assert rank.most == (1 + 2 + 2) * BYTES
    rank.forward([0, 1, 2, 3, 4, 5], trains=False)
    rank.forward([0, 1, 2, 3, 4, 5], trains=False)
    assert rank.gathered[20:] == [2, 3, 4, 5, 1, 2, 4]


def test_buckets_that_stay_do_not_keep_others_from_being_gathered_ahead() -> None:
    rank = _Rank(8, 2 * BYTES, stay=(0, 1, 2, 3))
    rank.forward(list(range(8)))
    rank.do(rank.sweeps.backward())
    rank.use(7)
    assert {5, 6} <= rank.there


def test_a_weight_at_both_ends_of_the_model_does_not_have_backward_gather_all_others() -> None:
    """An embedding whose weight is the head's: in an earlier version backward gathered the whole model for the head."""
    most = []
    for order in (None, [0, *range(7, 0, -1)]):
        rank = _Rank(8, 3 * BYTES, backward=order)
        for _ in range(2):
            rank.do(rank.sweeps.forward(trains=True))
            rank.use(0)
            rank.sweeps.rests(0)
            for bucket in range(1, 8):
                rank.use(bucket)
                rank.do(rank.sweeps.done(bucket))
            rank.use(0)
            rank.do(rank.sweeps.done(0))
            rank.do(rank.sweeps.backward())
            rank.most = 0
            rank.use(0)
            for bucket in reversed(range(1, 8)):
                rank.use(bucket)
                rank.do(rank.sweeps.done(bucket))
            rank.do(rank.sweeps.done(0))
            rank.do(rank.sweeps.backward_over())
            assert not rank.there
            rank.do(rank.sweeps.over())
            rank.do(rank.sweeps.next_step())
        most.append(rank.most)
    assert most[0] == 8 * BYTES
    assert most[1] <= 5 * BYTES, "the weight, what is used, and the room"


def test_a_step_without_a_pass_gathers_nothing() -> None:
    """As that of another optimizer of the model, after the same passes."""
    rank = _Rank(4, 2 * BYTES)
    rank.forward([0, 1, 2, 3])
    rank.backward([0, 1, 2, 3])
    rank.do(rank.sweeps.over())
    rank.do(rank.sweeps.next_step(ahead=False))
    before = list(rank.gathered)
    rank.do(rank.sweeps.over())
    assert rank.gathered == before
    rank.do(rank.sweeps.next_step())
    assert rank.gathered == [*before, 0, 1]
    rank.update()
    assert rank.gathered == [*before, 0, 1, 2, 3, 2, 1, 0, 0, 1], "others may have made a pass here"


def test_what_a_pass_has_left_is_gathered_at_its_end() -> None:
    rank = _Rank(4, 2 * BYTES)
    rank.forward([0])
    rank.do(rank.sweeps.over())
    assert rank.gathered == [0, 1, 2, 3, 2, 1, 0]
    assert not rank.there


def test_what_is_kept_for_backward_is_gathered_again_after_an_update() -> None:
    rank = _Rank(3, 4 * BYTES)
    for _ in range(2):  # as in evaluation: the last ones stay
        rank.forward([0, 1, 2], trains=False)
    assert rank.gathered == [0, 1, 2, 0]
    rank.update()
    assert rank.gathered == [0, 1, 2, 0, 0, 1, 2]


def test_buckets_to_keep_are_gathered_once_a_step_in_whatever_passes() -> None:
    rank = _Rank(6, 2 * BYTES, keep=(0, 3))
    for _ in range(2):
        rank.forward([0, 1, 2, 3, 4, 5])
        rank.backward([0, 1, 2, 3, 4, 5])
        assert rank.there == {0, 3}
        rank.forward([0, 1, 2, 3, 4, 5], trains=False)
        rank.forward([1, 2, 3, 4, 5])
        rank.backward([1, 2, 3, 4, 5])
        rank.do(rank.sweeps.over())
        assert not rank.there
        assert [rank.gathered.count(bucket) for bucket in range(6)] == [1, 5, 5, 1, 5, 2], "5 stays after forward"
        rank.gathered.clear()
        rank.do(rank.sweeps.next_step())
        assert 0 in rank.there
    assert rank.most <= (1 + 2 + 2) * BYTES


def test_buckets_to_gather_once_stay_until_the_last_backward_has_used_them() -> None:
    rank = _Rank(6, 2 * BYTES, once=range(6))
    everything = [0, 1, 2, 3, 4, 5]
    for _ in range(2):
        rank.forward(everything)
        rank.forward(everything)
        rank.backward(everything, last=False)
        rank.forward(everything)
        rank.backward(everything, last=False)
        assert rank.gathered == everything
        rank.do(rank.sweeps.backward(last=True))
        for bucket in reversed(everything):
            rank.use(bucket)
            rank.do(rank.sweeps.done(bucket))
            assert rank.there == set(everything[: bucket + 2]), (
                "there is room for two that are done with, one of them now"
            )
        rank.do(rank.sweeps.backward_over())
        assert not rank.there
        rank.forward(everything, trains=False)
        assert rank.gathered == everything * 2, "for an evaluation before the step"
        rank.do(rank.sweeps.over())
        rank.gathered.clear()
        rank.do(rank.sweeps.next_step())
        assert rank.gathered == everything, "ahead of the next step"


@pytest.mark.parametrize("seed", range(100))
def test_ranks_that_gather_once_gather_the_same_whatever_they_use(seed: int) -> None:
    script = random.Random(seed)
    buckets, room = script.randint(1, 12), BYTES * script.randint(1, 12)
    once = set(range(buckets)) if seed % 2 else {bucket for bucket in range(buckets) if script.random() < 0.5}
    keep = {bucket for bucket in range(buckets) if script.random() < 0.2}
    ranks = [_Rank(buckets, room, keep=keep, once=once) for _ in range(script.randint(2, 4))]
    evaluations = 0
    for _ in range(4):
        count = script.randint(1, 5)
        warm_up = script.randint(1, count)
        passes = "F" * warm_up + "BF" * (count - warm_up) + "B" * warm_up
        used: list[set[int]] = [set() for _ in ranks]
        for place, kind in enumerate(passes):
            for rank, mine in zip(ranks, used, strict=True):
                if kind == "F":
                    now = [bucket for bucket in range(buckets) if script.random() < 0.7]
                    mine.update(now)
                    rank.forward(now)
                else:
                    rank.backward(
                        [each for each in sorted(mine) if script.random() < 0.8], last=place + 1 == len(passes)
                    )
        if script.random() < 0.3:
            evaluations += 1
            for rank in ranks:
                rank.forward([bucket for bucket in range(buckets) if script.random() < 0.7], trains=False)
        for rank in ranks:
            rank.update()
        assert all(rank.gathered == ranks[0].gathered for rank in ranks)
    ahead = 1 if seed % 2 else 0  # else the room is taken by others
    for bucket in once:
        count = 4 + (0 if bucket in keep else evaluations)
        assert count + ahead <= ranks[0].gathered.count(bucket) <= count + 1


def test_what_is_kept_is_gathered_again_where_others_wrote_it() -> None:
    rank = _Rank(3, 2 * BYTES, keep=(1,))
    rank.forward([0, 1, 2])
    rank.backward([0, 1, 2])
    rank.do(rank.sweeps.replaced())
    assert not rank.there
    rank.forward([0, 1, 2])
    assert rank.gathered.count(1) == 2


def test_backward_gathers_from_the_shares_that_forward_has_left() -> None:
    rank = _Rank(6, 2 * BYTES, in_group=(0, 1, 2, 3, 5))
    for _ in range(2):
        rank.forward([0, 2, 4])
        assert {0, 1, 2} <= rank.shared
        rank.backward([0, 2, 4])
        assert rank.gathered == [0, 1, 2, 3, 4, 5, 4, ~3, ~2, ~1, ~0], "5 is there still, and 4 is in no group"
        rank.do(rank.sweeps.backward())
        rank.do(rank.sweeps.backward_over())
        assert rank.gathered[11:] == [5, 4, 3, 2, 1, 0], "a second backward finds no shares"
        rank.do(rank.sweeps.over())
        rank.gathered.clear()
        rank.do(rank.sweeps.next_step())


@pytest.mark.parametrize("end", ["another forward", "evaluation", "other values"])
def test_shares_that_no_backward_uses_are_let_go(end: str) -> None:
    rank = _Rank(6, 2 * BYTES, in_group=range(6))
    rank.forward([0, 1, 2, 3, 4, 5])
    assert {0, 1, 2} <= rank.shared
    if end == "other values":
        rank.do(rank.sweeps.replaced())
        assert not rank.shared
        rank.forward([0, 1, 2, 3, 4, 5])
        assert rank.gathered == [0, 1, 2, 3, 4, 5] * 2
        return
    rank.forward([0, 1, 2, 3, 4, 5], trains=end == "another forward")
    assert rank.gathered[6:] == [~4, ~3, ~2, ~1, ~0, 0, 1, 2, 3, 4, 5], "as on ranks that have gone back"
    if end == "evaluation":
        rank.do(rank.sweeps.rest())
        assert not rank.shared


def test_what_is_used_now_is_not_freed() -> None:
    """A module around others: its own parameters are used until it is left."""
    rank = _Rank(8, 2 * BYTES)
    rank.do(rank.sweeps.forward(trains=True))
    rank.use(0)
    for bucket in range(1, 8):
        rank.use(bucket)
        rank.do(rank.sweeps.done(bucket))
        assert 0 in rank.there
    rank.do(rank.sweeps.done(0))
    rank.do(rank.sweeps.backward())
    assert 0 not in rank.there or rank.gathered.count(0) == 2


def test_recomputation_uses_a_segment_forwards_and_then_backwards() -> None:
    rank = _Rank(8, 2 * BYTES)
    rank.forward(list(range(8)))
    before = len(rank.gathered)
    rank.do(rank.sweeps.backward())
    for start in (4, 0):
        for bucket in range(start, start + 4):
            rank.use(bucket)
        for bucket in reversed(range(start, start + 4)):
            rank.use(bucket)
            rank.do(rank.sweeps.done(bucket))
    rank.do(rank.sweeps.backward_over())
    assert sorted(rank.gathered[before:]) == list(range(7))  # the last one was there


def test_a_bucket_that_is_used_again_after_it_was_freed_is_gathered_with_all_others() -> None:
    ranks = [_Rank(6, 2 * BYTES) for _ in range(2)]
    for rank, buckets in zip(ranks, ([0, 1, 2, 3, 4, 5, 0], [0, 1, 2, 3, 4, 5, 0]), strict=True):
        rank.forward(buckets)
        rank.backward(buckets[:-1])
        rank.update()
    assert ranks[0].gathered == ranks[1].gathered
    assert ranks[0].gathered[:7] == [0, 1, 2, 3, 4, 5, 0]


@pytest.mark.parametrize("seed", range(300))
def test_ranks_that_leave_modules_out_gather_the_same(seed: int) -> None:
    script = random.Random(seed)
    buckets, room = script.randint(1, 12), BYTES * script.randint(1, 12)
    stay, keep = ([bucket for bucket in range(buckets) if seed % 3 and script.random() < 0.3] for _ in range(2))
    group = {bucket for bucket in range(buckets) if seed % 4 and script.random() < 0.5}.difference(stay, keep)
    ranks = [_Rank(buckets, room, stay, keep, group) for _ in range(script.randint(2, 4))]
    for _ in range(4):
        passes = [script.choice(["train", "train", "evaluate"]) for _ in range(script.randint(1, 3))]
        if "train" not in passes:
            passes.append("train")
        for kind in passes:
            for rank in ranks:
                used = [bucket for bucket in range(buckets) if script.random() < 0.6]
                rank.forward(used, trains=kind == "train")
                if kind == "train" and script.random() < 0.7:
                    rank.backward([bucket for bucket in used if script.random() < 0.8])
        for rank in ranks:
            rank.update()
        assert all(rank.gathered == ranks[0].gathered for rank in ranks)


@pytest.mark.parametrize("seed", range(100))
def test_no_more_is_whole_than_there_is_room_for(seed: int) -> None:
    script = random.Random(seed)
    buckets, room = script.randint(1, 12), BYTES * script.randint(1, 12)
    rank = _Rank(buckets, room)
    for _ in range(6):
        used = [bucket for bucket in range(buckets) if script.random() < 0.7]
        rank.forward(used)
        rank.backward(used)
        rank.update()
    assert rank.most <= BYTES + room


@pytest.mark.parametrize("seed", range(50))
def test_a_rank_without_a_batch_gathers_what_others_need(seed: int) -> None:
    script = random.Random(seed)
    buckets, room = script.randint(1, 12), BYTES * script.randint(1, 12)
    keep = [bucket for bucket in range(buckets) if seed % 2 and script.random() < 0.4]
    group = {bucket for bucket in range(buckets) if script.random() < 0.5}.difference(keep)
    ranks = [_Rank(buckets, room, keep=keep, in_group=group) for _ in range(2)]
    for _ in range(5):
        for rank in ranks:
            part = script.choice(["nothing", "forward", "all"])
            used = [bucket for bucket in range(buckets) if script.random() < 0.6]
            if part != "nothing":
                rank.forward(used)
            if part == "all":
                rank.backward(used)
            rank.update()
        assert ranks[0].gathered == ranks[1].gathered
