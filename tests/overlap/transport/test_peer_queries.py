"""Questions that cannot be answered, and letters that cannot be read: the thread outlives them."""

from __future__ import annotations

import pickle
import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from overlap.transport.peer_queries import NoAnswer, PeerQueries, _letter
from tests.gpu_double import eventually


class _Post:
    """Two ranks of a communicator that has nothing but letters."""

    def __init__(self, rank: int, boxes: list[queue.Queue[tuple[int, bytes]]]) -> None:
        self.rank, self.size, self._boxes = rank, len(boxes), boxes

    def post(self, peer: int, payload: bytes) -> None:
        self._boxes[peer].put((self.rank, payload))

    def receive_post(self, timeout: float) -> tuple[int, bytes]:
        return self._boxes[self.rank].get(timeout=timeout)


@pytest.fixture
def rooms() -> Iterator[list[PeerQueries]]:
    boxes: list[queue.Queue[tuple[int, bytes]]] = [queue.Queue(), queue.Queue()]
    both = [PeerQueries(_Post(rank, boxes)) for rank in range(2)]  # type: ignore[arg-type]
    yield both
    for room in both:
        room.close()


def _ask(room: PeerQueries, topic: str, question: Any = None) -> Any:
    return PeerQueries.wait(room.ask(1, topic, question), 1, topic, 5.0)


@pytest.mark.parametrize(
    ("topic", "question", "reason"),
    [
        ("fails", None, "rank 1 could not answer 'fails': ZeroDivisionError: "),
        ("no data", None, r"rank 1 could not answer 'no data': NotData: .*<lambda>"),
        ("over/there", None, "rank 1 could not answer 'over/there': LookupError: 'over/there' has ended"),
    ],
)
def test_who_asks_learns_why_there_is_no_answer_and_the_next_one_is_given(
    topic: str, question: Any, reason: str, rooms: list[PeerQueries]
) -> None:
    asker, other = rooms
    other.on("fails", lambda _rank, _question: 1 // 0)
    other.on("no data", lambda _rank, _question: lambda: None)
    other.off("over")
    other.on("echo", lambda rank, question: (rank, question))
    with pytest.raises(NoAnswer, match=reason):
        _ask(asker, topic, question)
    assert _ask(asker, "echo", "still there?") == (0, "still there?")


def test_news_that_cannot_be_read_are_passed_over(rooms: list[PeerQueries]) -> None:
    asker, other = rooms
    heard = []
    other.on("news", lambda rank, news: heard.append((rank, news)))
    other.on("echo", lambda _rank, question: question)
    unreadable = _letter("tell", 0, "news", None)[:-1] + b"!"
    asker._comm.post(1, unreadable)
    asker.tell(1, "news", "fine")
    assert _ask(asker, "echo", 1) == 1
    assert heard == [(0, "fine")]


def test_what_comes_before_its_reader_waits_and_keeps_its_order(rooms: list[PeerQueries]) -> None:
    """A rank that is ahead asks before the other can answer."""
    asker, other = rooms
    heard: list[Any] = []
    early = [asker.ask(1, "late", number) for number in range(3)]
    other.on("echo", lambda _rank, question: question)
    assert _ask(asker, "echo", 1) == 1  # so all three are there
    assert not any(answer.done() for answer in early)

    def answer(_rank: int, number: int) -> int:
        heard.append(number)
        return -number

    other.on("late", answer)
    early.append(asker.ask(1, "late", 3))
    assert [PeerQueries.wait(one, 1, "late", 5.0) for one in early] == [0, -1, -2, -3]
    assert heard == [0, 1, 2, 3]
    asker.tell(1, "dropped/below", "lost")
    assert _ask(asker, "echo", 2) == 2
    other.off("dropped")
    other.on("dropped/below", lambda _rank, news: heard.append(news))
    assert _ask(asker, "echo", 3) == 3
    assert heard == [0, 1, 2, 3]


def test_a_question_that_cannot_be_sent_is_not_waited_for(rooms: list[PeerQueries]) -> None:
    with pytest.raises(Exception, match="<lambda>"):
        rooms[0].ask(1, "echo", lambda: None)
    assert not rooms[0]._answers


def _no_room_for(_rank: int, payload: bytes) -> None:
    raise OSError(f"{len(payload)} bytes do not fit")


def test_a_letter_that_cannot_be_opened_is_passed_over(
    rooms: list[PeerQueries], caplog: pytest.LogCaptureFixture
) -> None:
    asker, other = rooms
    other.on("echo", lambda _rank, question: question)
    asker._comm.post(1, b"not a letter at all")
    asker._comm.post(1, b"")
    asker._comm.post(1, pickle.dumps(("ask", 0, "echo")))
    assert _ask(asker, "echo", 1) == 1
    assert len(caplog.messages) == 3
    assert all("rank 1: passed over a letter of rank 0: " in message for message in caplog.messages)


def test_an_answer_that_cannot_be_sent_leaves_the_next_question_answered(
    rooms: list[PeerQueries], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asker, other = rooms
    other.on("echo", lambda _rank, question: question)
    with monkeypatch.context() as patch:
        patch.setattr(other._comm, "post", _no_room_for)
        lost = asker.ask(1, "echo", 1)
        eventually(lambda: bool(caplog.messages))
    assert "OSError" in caplog.messages[0]
    assert _ask(asker, "echo", 2) == 2
    assert not lost.done()


def test_a_handler_may_wait_for_what_a_later_letter_says(rooms: list[PeerQueries]) -> None:
    """As a rank that follows others out of data does: what ends that comes behind the question for its state."""
    asking, asked = rooms[0], rooms[1]
    said = threading.Event()
    asked.on("state", lambda _sender, _question: said.wait(5.0), waits=True)
    asked.on("news", lambda _sender, _news: said.set())
    answer = asking.ask(1, "state")
    asking.tell(1, "news", None)
    assert answer.result(timeout=10.0) is True
