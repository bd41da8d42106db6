"""What is asked of torch.cuda, which is a double here: in which order, and on which stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from overlap.transport.cuda.streams import LastUpdate, Streams

PLACE = torch.device("cuda", 0)


class _Stream:
    def __init__(self, said: list[str], handle: int, name: str) -> None:
        self._said, self.cuda_stream, self.name = said, handle, name

    def wait_event(self, event: _Event) -> None:
        self._said.append(f"{self.name} waits for {event.name}")

    def wait_stream(self, other: _Stream) -> None:
        self._said.append(f"{self.name} follows {other.name}")


class _Event:
    def __init__(self, said: list[str]) -> None:
        self._said, self.name = said, "an event of nothing"

    def record(self, stream: _Stream) -> None:
        self.name = f"what {stream.name} was given"
        self._said.append(f"marks {self.name}")

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        self._said.append(f"the host waits for {self.name}")


class _There:
    """A tensor of the device's, which tells what is done with it."""

    is_cuda, device = True, PLACE

    def __init__(self, cuda: _Cuda) -> None:
        self._cuda = cuda

    def copy_(self, other: Any, non_blocking: bool) -> None:
        assert non_blocking
        self._cuda.said.append(f"copies on {self._cuda.now.name}")

    def record_stream(self, stream: _Stream) -> None:
        self._cuda.said.append(f"is held for {stream.name}")


class _Cuda:
    """torch.cuda, as far as we use it. Handle 0 is the default stream, as CUDA says it."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.default = self.now = _Stream(self.said, 0, "default")

    def Stream(self, device: torch.device, priority: int = 0) -> _Stream:
        assert device == PLACE
        return _Stream(self.said, 77, f"a new stream of priority {priority}")

    def ExternalStream(self, handle: int, device: torch.device) -> _Stream:
        assert device == PLACE
        # What torch does with handle 0, which it takes for none.
        return _Stream(self.said, handle, f"stream {handle}" if handle else "a new stream")

    def Event(self) -> _Event:
        return _Event(self.said)

    def default_stream(self, device: torch.device) -> _Stream:
        return self.default

    def current_stream(self, device: torch.device) -> _Stream:
        return self.now

    @contextmanager
    def stream(self, chosen: _Stream) -> Iterator[None]:
        before, self.now = self.now, chosen
        yield
        self.now = before


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> _Cuda:
    double = _Cuda()
    for name in ("Stream", "ExternalStream", "Event", "default_stream", "current_stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(double, name))
    return double


def test_the_default_stream_is_meant_by_handle_0(cuda: _Cuda) -> None:
    streams = Streams(PLACE)
    moment = streams.mark()
    cuda.said.clear()
    moment.order_before(streams.current())
    moment.order_before(5)
    side = "what a new stream of priority -1 was given"
    assert cuda.said == [f"default waits for {side}", f"stream 5 waits for {side}"]
    assert not moment.done()


def test_results_are_brought_on_the_stream_that_needs_them_and_held_for_it(cuda: _Cuda) -> None:
    streams, there, host = Streams(PLACE), _There(cuda), torch.zeros(1)
    for stream, name in ((None, "default"), (0, "default"), (5, "stream 5")):
        cuda.said.clear()
        moment = streams.bring([(there, host)], stream)  # type: ignore[list-item]
        what = f"what {name} was given"
        assert cuda.said == [f"copies on {name}", f"is held for {name}", f"marks {what}"]
        cuda.said.clear()
        moment.order_before(7)
        assert cuda.said == [f"stream 7 waits for {what}"]


def test_a_stream_follows_all_others_but_itself(cuda: _Cuda) -> None:
    streams = Streams(PLACE)
    streams.follow([0])
    assert cuda.said == []
    streams.follow({0, 5})
    assert cuda.said == ["marks what stream 5 was given", "default waits for what stream 5 was given"]


def test_what_is_computed_beside_is_held_for_the_side_stream(cuda: _Cuda) -> None:
    streams, there = Streams(PLACE), _There(cuda)
    streams.beside(lambda: cuda.said.append(f"computes on {cuda.now.name}"), [there])  # type: ignore[list-item]
    side = "a new stream of priority -1"
    assert cuda.said == [f"computes on {side}", f"is held for {side}"]
    assert cuda.now is cuda.default


def test_what_is_put_there_aside_follows_the_thread_s_own_stream(cuda: _Cuda) -> None:
    streams, there, host = Streams(PLACE), _There(cuda), torch.zeros(1)
    side = "a new stream of priority -1"
    with streams.aside():
        moment = streams.put(there, host)  # type: ignore[arg-type]
        assert streams.current() == streams.side
    marked = f"what {side} was given"
    assert cuda.said == [f"{side} follows default", f"copies on {side}", f"marks {marked}"]
    assert cuda.now is cuda.default
    moment.order_before(0)
    assert cuda.said[-1] == f"default waits for {marked}"


def test_copies_to_the_host_follow_the_current_stream_and_nobody_waits(cuda: _Cuda) -> None:
    class Host:
        def copy_(self, other: Any, non_blocking: bool) -> None:
            cuda.said.append(f"fetches on {cuda.now.name}")

    moment = Streams(PLACE).fetch([(Host(), _There(cuda))])  # type: ignore[list-item]
    what = "what default was given"
    assert cuda.said == ["fetches on default", "is held for default", f"marks {what}"]
    assert moment is not None
    moment.wait()
    assert cuda.said[-1] == f"the host waits for {what}"


def test_a_question_follows_the_last_update_and_nothing_behind_it(cuda: _Cuda) -> None:
    last = LastUpdate()
    with last.seen():
        assert cuda.now is cuda.default, "nothing was written yet"
    last.note(_There(cuda))  # type: ignore[arg-type]
    with last.seen():
        assert cuda.now is not cuda.default
    what = "what default was given"
    assert cuda.said == [f"marks {what}", f"a new stream of priority 0 waits for {what}"]
