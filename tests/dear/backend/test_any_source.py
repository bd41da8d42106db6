"""Who a receive from anybody takes its message from."""

from __future__ import annotations

import threading
from collections import deque

import pytest

import comm_core
from dear.backend.any_source import AnyReceive, AnySource


class Done:
    """A message that has come."""

    op, label, nbytes, seconds = "recv", "", 0, 0.0

    def wait(self, timeout: float | None = None) -> None: ...
    def done(self) -> bool:
        return True

    def exception(self) -> comm_core.Error | None:
        return None

    def order_before(self, stream: int) -> None: ...
    def describe(self) -> str:
        return "done"


class Post:
    """Ranks whose letters are carried when the test says so."""

    def __init__(self, size: int) -> None:
        self.letters: deque[tuple[int, int, object]] = deque()
        self.ranks = [AnySource(rank, size, self._teller(rank)) for rank in range(size)]

    def _teller(self, sender: int) -> object:
        return lambda peer, letter: self.letters.append((sender, peer, letter))

    def carry(self) -> None:
        for _ in range(100):
            if not self.letters:
                return
            sender, peer, letter = self.letters.popleft()
            self.ranks[peer].hear(sender, letter)
        raise AssertionError("letters go round in circles")


def receive(post: Post, rank: int, tag: int = 0) -> AnyReceive:
    one = AnyReceive("group", tag, lambda _peer: Done())
    post.ranks[rank].receive(one, tag)
    return one


def test_what_was_sent_before_is_received() -> None:
    post = Post(3)
    post.ranks[2].sends(0, 0)
    one = receive(post, 0)
    assert not one.done()
    post.carry()
    assert (one.done(), one.source) == (True, 2)


def test_what_is_sent_later_is_received_once() -> None:
    post = Post(3)
    first, second = receive(post, 0), receive(post, 0)
    post.carry()
    post.ranks[1].sends(0, 0)
    post.carry()
    assert (first.source, second.source) == (1, -1)
    post.ranks[1].sends(0, 0)
    post.carry()
    assert second.source == 1
    assert not post.letters


def test_who_sends_to_nobody_that_asks_tells_nothing() -> None:
    post = Post(2)
    post.ranks[1].sends(0, 0)
    post.ranks[0].receives(1, 0)
    assert not post.letters


def test_a_message_that_another_receive_takes_is_not_counted() -> None:
    post = Post(2)
    post.ranks[1].sends(0, 0)
    post.ranks[0].receives(1, 0)
    one = receive(post, 0)
    post.carry()
    assert not one.done()
    post.ranks[1].sends(0, 0)
    post.carry()
    assert one.source == 1


def test_a_message_that_another_receive_took_meanwhile_is_not_received_again() -> None:
    post = Post(2)
    one = receive(post, 0)
    post.carry()
    post.ranks[1].sends(0, 0)
    post.ranks[0].receives(1, 0)  # the letter that tells of it is on its way
    post.carry()
    assert not one.done()
    post.ranks[1].sends(0, 0)
    post.carry()
    assert one.source == 1


def test_tags_are_apart() -> None:
    post = Post(2)
    one = receive(post, 0, tag=3)
    post.ranks[1].sends(0, 4)
    post.carry()
    assert not one.done()
    post.ranks[1].sends(0, 3)
    post.carry()
    assert one.source == 1


def test_what_a_rank_sent_that_has_left_is_received() -> None:
    post = Post(3)
    for tag in (0, 0, 5):
        post.ranks[1].sends(0, tag)
    post.ranks[1].leave()
    assert len(post.letters) == 1, "to whom it has sent, one letter"
    post.carry()
    post.ranks[1].hear = lambda _sender, _letter: None  # type: ignore[method-assign,assignment]
    ones = [receive(post, 0, tag) for tag in (0, 0, 5, 0)]
    post.carry()
    assert [one.source for one in ones] == [1, 1, 1, -1]
    post.ranks[2].sends(0, 0)
    post.carry()
    assert ones[3].source == 2


def test_one_that_nobody_serves_ends_with_its_group() -> None:
    post = Post(2)
    one = receive(post, 0)
    with pytest.raises(comm_core.TimeoutError, match="from any rank, tag 0"):
        one.wait(0.01)
    threading.Timer(0.05, post.ranks[0].end, (comm_core.TransportError("over"),)).start()
    with pytest.raises(comm_core.TransportError, match="over"):
        one.wait(10)
    with pytest.raises(comm_core.TransportError, match="over"):
        receive(post, 0).wait(10)
