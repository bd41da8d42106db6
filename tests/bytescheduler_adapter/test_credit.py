"""The credit queue against a simulated wire: order, preemption and the limit on bytes under way."""

from __future__ import annotations

import random

import pytest

from bytescheduler_adapter.credit import CreditQueue


def test_the_most_urgent_goes_first_and_of_equals_who_came_first() -> None:
    queue: CreditQueue[str] = CreditQueue()
    for key, priority in (("c", 2), ("a0", 0), ("b", 1), ("a1", 0)):
        queue.push(key, priority, 10, credit=1000)
    assert queue.admit() == ["a0", "a1", "b", "c"]


def test_at_the_end_all_go_in_the_same_order_whatever_the_credit() -> None:
    queue: CreditQueue[str] = CreditQueue()
    for key, priority, step in (("c", 2, 0), ("a0", 0, 0), ("next", 0, 1), ("b", 1, 0), ("a1", 0, 0)):
        queue.push(key, priority, 10, credit=10, step=step)
    assert queue.admit() == ["a0"]
    assert queue.admit_all() == ["a1", "b", "c", "next"]
    assert not queue


def test_no_step_overtakes_another() -> None:
    queue: CreditQueue[str] = CreditQueue()
    queue.push("urgent, of the next step", 0, 10, credit=1000, step=1)
    queue.push("of this step", 5, 10, credit=1000, step=0)
    assert queue.admit() == ["of this step", "urgent, of the next step"]


def test_credit_holds_back_and_returns() -> None:
    queue: CreditQueue[int] = CreditQueue()
    for key in range(4):
        queue.push(key, key, 10, credit=20)
    assert queue.admit() == [0, 1]
    assert queue.admit() == []
    queue.release(0)
    assert queue.admit() == [2]
    assert queue.bytes_under_way == 20
    with pytest.raises(KeyError):
        queue.release(0)


def test_a_partition_larger_than_the_credit_travels_alone() -> None:
    queue: CreditQueue[str] = CreditQueue()
    queue.push("large", 1, 100, credit=20)
    queue.push("small", 2, 1, credit=20)
    assert queue.admit() == ["large"]
    queue.release("large")
    assert queue.admit() == ["small"]


def test_a_layer_nearer_the_input_preempts_between_partitions() -> None:
    queue: CreditQueue[tuple[str, int]] = CreditQueue()
    for part in range(4):
        queue.push(("last", part), 9, 10, credit=10)
    sent = queue.admit()
    for part in range(2):
        queue.push(("first", part), 0, 10, credit=10)
    while queue or queue.bytes_under_way:
        queue.release(sent[-1])
        sent += queue.admit()
    assert [name for name, _ in sent] == ["last", "first", "first", "last", "last", "last"]


@pytest.mark.parametrize("seed", range(20))
def test_over_a_simulated_wire_everything_travels_once_within_the_credit(seed: int) -> None:
    rng = random.Random(seed)
    queue: CreditQueue[int] = CreditQueue()
    nbytes = [rng.randint(1, 50) for _ in range(60)]
    credit, largest = rng.randint(1, 120), max(nbytes)
    arriving, under_way, sent = list(range(60)), [], []
    while arriving or queue or under_way:
        if arriving and rng.random() < 0.6:
            key = arriving.pop(0)
            queue.push(key, 60 - key, nbytes[key], credit)
        elif under_way:
            queue.release(under_way.pop(0))
        admitted = queue.admit()
        under_way += admitted
        sent += admitted
        assert queue.bytes_under_way == sum(nbytes[key] for key in under_way) < credit + largest
        assert not queue or under_way, "nothing travels although something waits"
    assert sorted(sent) == list(range(60))
