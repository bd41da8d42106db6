"""Which communicators an optimizer gets, of all ranks or of a process set."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from overlap.job.groups import beside, divided, leader, membership
from overlap.job.process_set import ProcessSet, global_process_set


def _session(rank: int = 1, size: int = 4) -> Any:
    """Its communicators are objects with a color: of all ranks, of a process set, or None of a rank alone."""

    def make(color: object) -> Any:
        return SimpleNamespace(color=color)

    channels = SimpleNamespace(lease=lambda count, levels=None: [make("all") for _ in range(count)])
    return SimpleNamespace(channels=channels, subset=make, comm=SimpleNamespace(rank=rank, size=size), levels=(None,))


def _set(me: int, *ranks: int) -> ProcessSet:
    made = ProcessSet(ranks)
    made._register(3, ranks, me)
    return made


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("process_set", [global_process_set, _set(1, 1, 2)])
def test_whoever_waits_for_a_reduction_is_not_behind_a_gather_or_a_call(process_set: ProcessSet, lanes: int) -> None:
    found = membership(_session(), process_set, sharding=True, lanes=lanes)
    assert len({id(each) for each in (*found.reductions, *found.gathers, found.calls)}) == 2 * lanes + 1
    assert (len(found.reductions), len(found.gathers)) == (lanes, lanes)
    whole = membership(_session(), process_set, sharding=False)
    assert whole.gathers == whole.reductions
    assert whole.calls is not whole.comm


def _colors(*communicators: Any) -> set[object]:
    return {each.color for each in communicators}


def test_a_rank_outside_of_a_set_trains_alone() -> None:
    inside, outside = (membership(_session(rank), _set(rank, 1, 2), sharding=True) for rank in (1, 3))
    assert (inside.ranks, outside.ranks) == ((1, 2), (3,))
    assert _colors(*inside.reductions, *inside.gathers, inside.calls) == {3}
    assert _colors(*outside.reductions, *outside.gathers, outside.calls) == {None}
    assert [_colors(beside(_session(rank), _set(rank, 1, 2))) for rank in (1, 3)] == [{3}, {None}]
    assert [leader(_set(rank, 1, 2), rank) for rank in (2, 3)] == [1, 3]


def test_all_ranks_are_those_of_the_job() -> None:
    session = _session()
    assert membership(session, global_process_set, sharding=True).ranks == (0, 1, 2, 3)
    assert beside(session, global_process_set) is session.comm


def test_a_set_that_is_not_registered_is_refused() -> None:
    with pytest.raises(ValueError, match=r"is not registered: pass it to init\(process_sets=…\)"):
        membership(_session(), ProcessSet([1, 2]), sharding=True)


def test_shards_are_divided_within_groups_of_one_size() -> None:
    ranks, hosts = (0, 1, 2, 3), ((0, 2), (1, 3), (4,))
    assert divided(ranks, None) == (ranks,)
    assert divided(ranks, 2) == ((0, 1), (2, 3))
    assert divided(ranks, "host", hosts) == ((0, 2), (1, 3))
    assert divided(ranks, [[2, 0], [3, 1]]) == ((0, 2), (1, 3)), "shards are in the order of ranks"
    assert divided((1, 3), 1) == ((1,), (3,))


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        (3, "shard_group=3 does not divide the 4 ranks"),
        (0, "shard_group=0 does not divide"),
        (True, "and is True"),
        ("rack", "and is 'rack'"),
        ("host", "makes groups of 3, 1 ranks"),
        ([[0, 1], [2, 2]], "each of the ranks .0, 1, 2, 3. once"),
        ([[0, 1, 2], [3]], "makes groups of 3, 1 ranks"),
    ],
)
def test_what_makes_no_groups_is_refused(wish: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        divided((0, 1, 2, 3), wish, ((0, 1, 2), (3,)))
