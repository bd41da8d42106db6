"""Stamps of a device, on a double of torch.cuda: streams that pass what they were given when they are told to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from overlap.core.clock import StepClock
from overlap.transport.cuda import stamps
from overlap.transport.cuda.stamps import DeviceStamps
from overlap.transport.stamps import Stamps

DEVICE = torch.device("cpu")


class Stream:
    """Knows when what it was given so far is over, in seconds of the device."""

    def __init__(self, cuda: Cuda, number: int) -> None:
        self.cuda, self.cuda_stream, self.end = cuda, number, 0.0
        cuda.streams[number] = self

    def compute(self, seconds: float) -> None:
        self.end = max(self.end, self.cuda.launched) + seconds


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self.timing, self.at = enable_timing, -1.0

    def record(self, stream: Stream) -> None:
        self.at = max(stream.end, stream.cuda.launched)

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: Event) -> float:
        assert self.timing
        assert other.timing
        return 1e3 * (other.at - self.at)


class Cuda:
    """What is asked of torch.cuda. Its host launches everything at once."""

    Event = Event

    def __init__(self) -> None:
        self.launched, self.synchronized = 0.0, 0
        self.streams: dict[int, Stream] = {}
        self.current = Stream(self, 0)

    def Stream(self, _device: torch.device) -> Stream:
        return Stream(self, len(self.streams))

    def current_stream(self, _device: torch.device) -> Stream:
        return self.current

    def synchronize(self, _device: torch.device) -> None:
        self.synchronized += 1

    def operation(self, seconds: float, lane: Stream) -> Any:
        """On a stream of a communicator, after what the current stream was given."""
        lane.end = max(lane.end, self.current.end) + seconds
        end = lane.end

        def order_before(stream: int) -> None:
            self.streams[stream].end = max(self.streams[stream].end, end)

        return SimpleNamespace(order_before=order_before, seconds=1e-5, label="b0")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    found = Cuda()
    monkeypatch.setattr(stamps, "torch", SimpleNamespace(cuda=found))
    monkeypatch.setattr(stamps, "time", SimpleNamespace(perf_counter=lambda: 100.0))
    return found


def test_a_stamp_is_when_the_device_passes_it(cuda: Cuda) -> None:
    """And nobody waits before it is read; on the scale of the host's clock."""
    made = DeviceStamps(DEVICE, on_streams=True)
    before = made.now()
    cuda.current.compute(2.0)
    after = made.now()
    assert cuda.synchronized == 0
    seconds = made.reader()
    assert cuda.synchronized == 1
    assert (seconds(before), seconds(after)) == (100.0, 102.0)


def test_operations_of_two_lanes_are_over_each_by_itself(cuda: Cuda) -> None:
    made, lanes = DeviceStamps(DEVICE, on_streams=True), (cuda.Stream(DEVICE), cuda.Stream(DEVICE))
    works = [cuda.operation(5.0, lanes[0]), cuda.operation(1.0, lanes[1]), cuda.operation(1.0, lanes[0])]
    over = [made.over(work, lane) for work, lane in zip(works, ("long", "short", "long"), strict=True)]
    cuda.current.compute(0.5)
    assert [made.reader()(one) for one in over] == [105.0, 101.0, 106.0]
    assert made.reader()(made.now()) == 100.5, "the computation waits for none of them"


def test_operations_of_the_host_know_themselves(cuda: Cuda) -> None:
    assert DeviceStamps(DEVICE, on_streams=False).over(SimpleNamespace(seconds=1.0), "lane") is None
    assert Stamps().over(SimpleNamespace(seconds=1.0), "lane") is None


def test_a_step_of_a_device_is_measured_where_it_computes(cuda: Cuda) -> None:
    """A layer, a wait for its parameters, its gradient, an operation under way beside: all launched at one moment."""
    layer = torch.nn.Linear(2, 2)
    lane = cuda.Stream(DEVICE)
    clock = StepClock({id(layer.weight): 0}, stamps=DeviceStamps(DEVICE, on_streams=True))
    bucket: Any = SimpleNamespace(index=0, lane=0, nbytes=16, sharded=False, outgoing=torch.zeros(4), work=None)
    bucket.collectives = SimpleNamespace(
        reduce=lambda _comm, bucket: setattr(bucket, "work", cuda.operation(4.0, lane))
    )
    clock.watch([bucket])
    clock.entered(layer)
    since = clock.now()
    cuda.current.compute(0.25)  # the wait
    clock.waited(since, None)
    clock.passed(since)
    cuda.current.compute(1.0)
    clock.left()
    cuda.current.compute(2.0)
    came = clock.now()
    bucket.collectives.reduce(None, bucket)
    clock.gradient(0, came)
    clock.stepping()
    cuda.current.compute(8.0)
    clock.stepped()
    (lap,), (sent,) = clock.read()
    assert lap.used == [(0, 100.0)]
    assert lap.waits == lap.gates == [(100.0, 100.25)]
    assert lap.left == [101.25]
    assert lap.gradients == [(0, 103.25, 103.25)]
    assert (lap.stepping, lap.ended) == (103.25, 111.25)
    assert (sent.issued, sent.ended, sent.nbytes) == (103.25, 107.25, 16)
