"""What rank 0 decides from what the ranks ask for, without any communicator."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from overlap.horovod.controller.coordinator import Coordinator, Decision
from overlap.horovod.controller.request import Kind, Request, TensorSpec

JOIN = Request(Kind.JOIN, "join")


def _ask(name: str, kind: Kind = Kind.ALLREDUCE, shape: tuple[int, ...] = (3,), **others: Any) -> Request:
    return Request(kind, name, tensors=(TensorSpec(shape, "float32"),), **others)


def _titles(decisions: Iterable[Decision]) -> list[str]:
    return [response.request.name for _, response in decisions]


def _error(decisions: list[Decision]) -> str:
    ((_, response),) = decisions
    assert response.error
    return response.error


def test_operations_are_carried_out_in_the_order_in_which_they_become_complete() -> None:
    coordinator = Coordinator(2)
    assert coordinator.submit(0, _ask("a")) == []
    assert coordinator.submit(0, _ask("b")) == []
    assert _titles(coordinator.submit(1, _ask("b"))) == ["b"]
    ((ranks, response),) = coordinator.submit(1, _ask("a"))
    assert (ranks, response.request.name, response.error) == ((0, 1), "a", "")
    assert coordinator.missing() == []


def test_the_same_name_may_mean_several_kinds_and_may_come_again() -> None:
    coordinator = Coordinator(2)
    coordinator.submit(0, _ask("x"))
    assert coordinator.submit(1, _ask("x", Kind.BROADCAST)) == []
    assert _titles(coordinator.submit(1, _ask("x"))) == ["x"]
    coordinator.submit(1, _ask("x"))
    assert _titles(coordinator.submit(0, _ask("x"))) == ["x"]


@pytest.mark.parametrize(
    ("first", "second", "values"),
    [
        (_ask("x"), _ask("x", shape=(4,)), ["shapes", "(3,) on rank 0", "(4,) on rank 1"]),
        (_ask("x", op="SUM"), _ask("x", op="MAX"), ["reduction", "SUM on rank 0", "MAX on rank 1"]),
        (_ask("x", prescale=1.0), _ask("x", prescale=0.5), ["prescale_factor", "1.0", "0.5"]),
        (_ask("x", postscale=1.0), _ask("x", postscale=2.0), ["postscale_factor", "1.0", "2.0"]),
        (
            _ask("x", Kind.BROADCAST, root=0),
            _ask("x", Kind.BROADCAST, root=1),
            ["root_rank", "0 on rank 0", "1 on rank 1"],
        ),
        (
            _ask("x", Kind.ALLGATHER, shape=(3, 4)),
            _ask("x", Kind.ALLGATHER, shape=(9, 5)),
            ["beyond the first", "(3, 4) on rank 0", "(9, 5) on rank 1"],
        ),
        (
            Request(Kind.ALLREDUCE, "x", tensors=(TensorSpec((1,), "float32"),)),
            Request(Kind.ALLREDUCE, "x", tensors=(TensorSpec((1,), "float16"),)),
            ["dtypes", "float32 on rank 0", "float16 on rank 1"],
        ),
        (
            Request(Kind.BROADCAST, "x", tensors=(TensorSpec((1,), "float32", "weight"),)),
            Request(Kind.BROADCAST, "x", tensors=(TensorSpec((1,), "float32", "bias"),)),
            ["names", "weight on rank 0", "bias on rank 1"],
        ),
        (_ask("x"), Request(Kind.ALLREDUCE, "x"), ["number of tensors", "1 on rank 0", "0 on rank 1"]),
        (_ask("x"), Request(Kind.ALLREDUCE, "x", refusal="root 9?"), ["refused on rank 1", "root 9?"]),
    ],
)
def test_ranks_that_disagree_are_told_both_values_and_nothing_is_sent(
    first: Request, second: Request, values: list[str]
) -> None:
    coordinator = Coordinator(2)
    coordinator.submit(0, first)
    ((ranks, response),) = coordinator.submit(1, second)
    assert ranks == (0, 1)
    assert response.mismatch
    assert all(value in response.error for value in (*values, "'x'")), response.error
    coordinator.submit(0, _ask("x"))
    assert _titles(coordinator.submit(1, _ask("x"))) == ["x"]  # the name can be used again


def test_one_tensor_of_a_group_is_named_in_the_message() -> None:
    coordinator = Coordinator(2)
    specs = (TensorSpec((1,), "float32"), TensorSpec((2,), "float32"))
    coordinator.submit(0, Request(Kind.ALLREDUCE, "g", tensors=specs))
    text = _error(coordinator.submit(1, Request(Kind.ALLREDUCE, "g", tensors=(specs[0], specs[0]))))
    assert "tensor 1 of 2" in text


def test_rows_and_splits_of_all_ranks_travel_with_the_response() -> None:
    coordinator = Coordinator(2)
    coordinator.submit(1, _ask("g", Kind.ALLGATHER, shape=(5, 2)))
    ((_, gather),) = coordinator.submit(0, _ask("g", Kind.ALLGATHER, shape=(0, 2)))
    assert gather.rows == ((0, 5),)
    coordinator.submit(1, _ask("a", Kind.ALLTOALL, splits=(1, 2)))
    ((_, exchange),) = coordinator.submit(0, _ask("a", Kind.ALLTOALL, splits=(3, 0)))
    assert exchange.splits == ((3, 0), (1, 2))


def test_a_broadcast_follows_the_roots_request() -> None:
    coordinator = Coordinator(2)
    coordinator.submit(0, Request(Kind.BROADCAST_OBJECT, "o", root=1))
    ((_, response),) = coordinator.submit(1, _ask("o", Kind.BROADCAST_OBJECT, shape=(77,), root=1))
    assert response.request.tensors[0].shape == (77,)


def test_ranks_that_joined_are_not_waited_for() -> None:
    coordinator = Coordinator(3)
    coordinator.submit(0, _ask("pending"))
    coordinator.submit(2, _ask("pending"))
    ((_, response),) = coordinator.submit(1, JOIN)
    assert (response.request.name, response.error) == ("pending", "")
    coordinator.submit(0, Request(Kind.BARRIER, "b"))
    assert _titles(coordinator.submit(2, Request(Kind.BARRIER, "b"))) == ["b"]


@pytest.mark.parametrize(
    "kind", [Kind.ALLGATHER, Kind.BROADCAST, Kind.BROADCAST_OBJECT, Kind.ALLTOALL, Kind.REDUCESCATTER]
)
def test_what_needs_every_rank_fails_while_some_have_joined_and_leaves_no_trace(kind: Kind) -> None:
    coordinator = Coordinator(3)
    coordinator.submit(1, JOIN)
    for _ in range(2):
        assert coordinator.submit(0, _ask("x", kind)) == []
        assert "after rank 1 has joined" in _error(coordinator.submit(2, _ask("x", kind)))
        coordinator.submit(0, _ask("sum"))
        assert _titles(coordinator.submit(2, _ask("sum"))) == ["sum"]
    coordinator.submit(0, JOIN)
    assert _titles(coordinator.submit(2, JOIN)) == ["join"]
    assert coordinator.missing() == []


def test_what_the_last_join_completes_comes_before_the_join() -> None:
    """After it, whoever has joined would be asked again."""
    coordinator = Coordinator(2)
    coordinator.submit(1, _ask("x"))
    coordinator.submit(1, JOIN)
    assert _titles(coordinator.submit(0, JOIN)) == ["x", "join"]
    assert coordinator.missing() == []


def test_join_is_answered_with_the_last_rank_once_everything_before_it_is_done() -> None:
    coordinator = Coordinator(2)
    coordinator.submit(1, JOIN)
    coordinator.submit(0, _ask("unawaited", Kind.ALLREDUCE))
    coordinator.submit(0, _ask("unfinished", Kind.BARRIER))
    decisions = coordinator.submit(0, JOIN)
    assert _titles(decisions) == ["join"]
    assert decisions[-1][1].number == 0
    assert coordinator.submit(0, _ask("next")) == []  # everybody is back


def test_what_waits_for_a_rank_that_has_shut_down_is_answered_at_once() -> None:
    coordinator = Coordinator(2)
    coordinator.submit(0, _ask("x"))
    assert "rank 1 has shut down" in _error(coordinator.leave(1, "has shut down"))
    assert "rank 1 has shut down" in _error(coordinator.submit(0, _ask("y")))
    assert not coordinator.everybody_left
    coordinator.leave(0, "has shut down")
    assert coordinator.everybody_left


def test_a_rank_that_asked_before_it_left_still_takes_part() -> None:
    coordinator = Coordinator(2)
    coordinator.submit(1, _ask("x"))
    assert coordinator.leave(1, "has shut down") == []
    assert _titles(coordinator.submit(0, _ask("x"))) == ["x"]


def test_what_was_given_up_fails_once_and_the_ranks_that_joined_are_asked_again() -> None:
    coordinator = Coordinator(2)
    coordinator.submit(1, Request(Kind.BARRIER, "b"))
    coordinator.submit(0, JOIN)
    coordinator.submit(1, _ask("x"))
    coordinator.submit(1, _ask("y", Kind.ALLGATHER))
    coordinator.submit(0, _ask("z", Kind.BROADCAST))
    given_up = coordinator.give_up("no rank goes on")
    assert {(ranks, response.error) for ranks, response in given_up} == {((0, 1), "no rank goes on")}
    assert set(_titles(given_up)) == {"join", "z"}
    assert coordinator.missing() == coordinator.give_up("again") == []
    assert coordinator.submit(1, _ask("next")) == []  # rank 0 has to ask for it
    assert _titles(coordinator.submit(0, _ask("next"))) == ["next"]


def _add(coordinator: Coordinator, *ranks: int) -> Decision:
    request = Request(Kind.ADD_PROCESS_SET, f"{ranks}", ranks=ranks)
    decisions = [coordinator.submit(rank, request) for rank in coordinator.members(0)]
    (decision,) = decisions[-1]
    return decision


def test_process_sets_come_and_go() -> None:
    coordinator = Coordinator(3)
    told, response = _add(coordinator, 0, 2)
    assert (told, response.number) == ((0, 1, 2), 1)
    coordinator.submit(0, _ask("x", process_set=1))
    assert "rank 1 is not in it" in _error(coordinator.submit(1, _ask("x", process_set=1)))
    ((told, _),) = coordinator.submit(2, _ask("x", process_set=1))
    assert told == (0, 2)
    assert "same ranks" in _add(coordinator, 0, 2)[1].error
    assert "not in this job" in _add(coordinator, 0, 7)[1].error
    assert "set 0 has the same ranks" in _add(coordinator, 0, 1, 2)[1].error
    assert "no ranks" in _add(coordinator)[1].error
    assert _add(coordinator, 1)[1].number == 2
    coordinator.submit(0, _ask("late", process_set=1))
    coordinator.submit(0, _ask("another"))
    remove = Request(Kind.REMOVE_PROCESS_SET, "1", ranks=(0, 2))
    coordinator.submit(0, remove)
    coordinator.submit(1, remove)
    decisions = coordinator.submit(2, remove)
    assert _titles(decisions) == ["1", "late"]
    assert "removed" in decisions[1][1].error
    assert "removed" in _error(coordinator.submit(0, _ask("x", process_set=1)))
    assert [waiting.title for waiting, _ in coordinator.missing()] == ["allreduce 'another'"]


def test_a_factor_that_is_no_number_is_the_same_on_all_ranks() -> None:
    coordinator = Coordinator(2)
    factors = {"prescale": float("nan"), "postscale": float("nan")}
    coordinator.submit(0, Request(Kind.ALLREDUCE, "x", **factors))
    ((_, response),) = coordinator.submit(1, Request(Kind.ALLREDUCE, "x", **{k: float("nan") for k in factors}))
    assert not response.error


def test_who_is_missing_is_known() -> None:
    now = [10.0]
    coordinator = Coordinator(3, clock=lambda: now[0])
    coordinator.submit(1, _ask("old"))
    now[0] = 20.0
    coordinator.submit(0, _ask("new"))
    found = [(waiting.title, waiting.since, absent) for waiting, absent in coordinator.missing()]
    assert found == [("allreduce 'old'", 10.0, [0, 2]), ("allreduce 'new'", 20.0, [1, 2])]


def test_who_goes_on_after_a_join_that_failed_is_waited_for_again() -> None:
    coordinator = Coordinator(3)
    coordinator.submit(0, Request(Kind.ADD_PROCESS_SET, "pair", ranks=(0, 1)))
    coordinator.submit(1, Request(Kind.ADD_PROCESS_SET, "pair", ranks=(0, 1)))
    coordinator.submit(2, Request(Kind.ADD_PROCESS_SET, "pair", ranks=(0, 1)))
    assert coordinator.submit(0, JOIN) == []
    assert "rank 2 has failed" in _error(coordinator.leave(2, "has failed"))
    pair = _ask("x", process_set=1)
    assert coordinator.submit(1, pair) == []
    ((_, response),) = coordinator.submit(0, pair)
    assert response.error == ""
