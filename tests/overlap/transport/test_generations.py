"""Who trains together next: the decision, without a store."""

from __future__ import annotations

import pytest

from overlap.transport.torch.generations import Member, is_over, next_generation

A, B, C = Member(0, 0), Member(1, 0), Member(2, 0)
B_AGAIN = Member(1, 1)


def test_a_member_is_named_and_found_by_its_name() -> None:
    assert Member.of(str(Member(12, 3))) == Member(12, 3)


@pytest.mark.parametrize(
    ("last", "alive", "ready", "expected"),
    [
        ([], {A, B, C}, {A, B, C}, [A, B, C]),
        ([], {A, B, C}, {A, C}, None),
        ([], {A, B_AGAIN, C}, {A, B_AGAIN, C}, [A, B_AGAIN, C]),
        ([A, B, C], {A, C}, {A, C}, [A, C]),
        ([A, B, C], {A, C}, {A}, None),
        ([A, B, C], {A, B, C}, {A, C}, None),
        ([A, B, C], {A, B_AGAIN, C}, {A, B_AGAIN, C}, [A, C, B_AGAIN]),
        ([A, B, C], {A, B_AGAIN, C}, {A, C}, [A, C]),
        ([A, C], {A, B_AGAIN, C}, {B_AGAIN}, None),
        ([A, B], {Member(0, 1), B_AGAIN}, {B_AGAIN}, None),
        ([A, B], {Member(0, 1), B_AGAIN}, {Member(0, 1), B_AGAIN, A}, [Member(0, 1), B_AGAIN]),
    ],
    ids=[
        "all have come",
        "one is still to come",
        "one was lost before all had come",
        "two go on",
        "one does not know yet",
        "who is alive is waited for",
        "one is back at once",
        "one is back, and not ready",
        "who is back waits for those that train",
        "nobody is left, and one is still to come",
        "nobody is left, and all have come again",
    ],
)
def test_next_generation(
    last: list[Member], alive: set[Member], ready: set[Member], expected: list[Member] | None
) -> None:
    assert next_generation(last, alive, ready, size=2 if len(last) == 2 and B in last else 3) == expected


def test_training_is_over_once_one_has_ended_well() -> None:
    assert is_over([A, C], {A})
    assert not is_over([A, C], {B})
    assert not is_over([], set())
