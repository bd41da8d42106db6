"""The parts of CUDA that carriers use through torch: streams, events, pinned memory.

A seam: tests put something else behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from overlap.transport.cuda.stamps import DeviceStamps
from overlap.transport.stamps import Stamps

__all__ = ["LastUpdate", "Moment", "Reading", "Streams", "on_device"]


def _stream(handle: int, device: torch.device) -> torch.cuda.Stream:
    """The stream of that handle. 0 is the default stream, of which ExternalStream would make a new one."""
    return torch.cuda.ExternalStream(handle, device=device) if handle else torch.cuda.default_stream(device)


class Moment:
    """A point in a stream of `device`, which `event` was recorded at."""

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event, self._device = event, device

    def done(self) -> bool:
        """Whether the device has passed this point."""
        return bool(self._event.query())

    def wait(self) -> None:
        """Block until the device has passed this point."""
        self._event.synchronize()

    def order_before(self, stream: int) -> None:
        """Make what is enqueued on `stream` from now on run after this point."""
        _stream(stream, self._device).wait_event(self._event)


class Streams:
    """The streams of one CUDA device. Handles are CUDA's, as integers."""

    #: Type of the tensors that lie there.
    kind = "cuda"

    def __init__(self, device: torch.device) -> None:
        self._place = device
        self.device = torch.cuda.current_device() if device.index is None else device.index  # its number
        self._side = torch.cuda.Stream(device, priority=-1)
        self.side = int(self._side.cuda_stream)  # the carrier's own

    def current(self) -> int:
        """The stream on which the calling thread computes."""
        return int(torch.cuda.current_stream(self._place).cuda_stream)

    def bind(self) -> None:
        """Make the device the current one of the calling thread, which has just begun."""
        torch.cuda.set_device(self._place)

    def follow(self, others: Iterable[int]) -> None:
        """Have what that stream is given next run after all that `others` were given so far. Does not block."""
        current = torch.cuda.current_stream(self._place)
        for other in set(others) - {int(current.cuda_stream)}:
            event = torch.cuda.Event()
            event.record(_stream(other, self._place))
            current.wait_event(event)

    def capturing(self) -> bool:
        """Whether that stream is being captured into a CUDA graph."""
        return bool(torch.cuda.is_current_stream_capturing())

    def beside(self, compute: Callable[[], None], touched: Sequence[torch.Tensor]) -> None:
        """Have `compute` enqueue its work on the side stream; `touched` are not reused before that is done."""
        with torch.cuda.stream(self._side):
            compute()
        for tensor in touched:
            tensor.record_stream(self._side)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """A context in which the side stream is the current one, after what the thread's own was given so far."""
        self._side.wait_stream(torch.cuda.current_stream(self._place))
        with torch.cuda.stream(self._side):
            yield

    def scratch(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory for the side stream."""
        with torch.cuda.stream(self._side):
            return torch.empty(numel, dtype=dtype, device=self._place)

    def mark(self) -> Moment:
        """The moment at which the side stream has done what it was given so far."""
        return self._moment(self._side)

    def stamps(self, *, on_streams: bool) -> Stamps:
        """Moments of the computation, and of operations, which are `on_streams` of the device or the host's."""
        return DeviceStamps(self._place, on_streams=on_streams)

    def pinned(self, like: torch.Tensor) -> torch.Tensor:
        """Host memory that the device can copy to and from, with as many elements as `like` has."""
        return torch.empty(like.numel(), dtype=like.dtype, pin_memory=True, device="cpu")

    def fetch(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Moment | None:
        """Copy (host, device) pairs to the host, after what the current stream was given. Does not block.

        Gives the moment at which they are there; None where they are already.
        """
        stream = torch.cuda.current_stream(self._place)
        for host, there in pairs:
            host.copy_(there, non_blocking=True)
            there.record_stream(stream)
        return self._moment(stream)

    def bring(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], stream: int | None) -> Moment | None:
        """Copy (device, host) pairs to the device on `stream` (None: the current one). As :meth:`fetch`."""
        chosen = torch.cuda.current_stream(self._place) if stream is None else _stream(stream, self._place)
        with torch.cuda.stream(chosen):
            for there, host in pairs:
                there.copy_(host, non_blocking=True)
                there.record_stream(chosen)  # who lets go of it meanwhile may use another stream
        return self._moment(chosen)

    def put(self, there: torch.Tensor, host: torch.Tensor) -> Moment:
        """Copy pinned memory to the device on the current stream. Does not block.

        Until the moment that this gives, neither's memory may be given back or written to.
        """
        there.copy_(host, non_blocking=True)
        return self._moment(torch.cuda.current_stream(self._place))

    def _moment(self, stream: torch.cuda.Stream) -> Moment:
        event = torch.cuda.Event()
        event.record(stream)
        return Moment(event, self._place)


def on_device(tensor: torch.Tensor) -> bool:
    """Whether the host only launches what is computed with `tensor`, and would wait for its values."""
    return tensor.is_cuda


class Reading:
    """Numbers that a device has computed, on their way to the host, which looks when they are there.

    `numbers` are flat, in float64, computed on the current stream.
    """

    def __init__(self, numbers: torch.Tensor) -> None:
        self._event = torch.cuda.Event() if numbers.is_cuda else None
        self._host = torch.empty(numbers.numel(), dtype=numbers.dtype, pin_memory=numbers.is_cuda, device="cpu")
        self._host.copy_(numbers, non_blocking=True)
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(numbers.device))

    def there(self) -> bool:
        """Whether :meth:`values` would return at once. Never blocks."""
        return self._event is None or bool(self._event.query())

    def values(self) -> list[float]:
        """Blocks until they are there."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.tolist()


class LastUpdate:
    """The time at which values on a device were last written, for a thread that reads them beside the computation.

    [Note: questions pass a blocked stream] A rank that answers for its share of the state may have its stream waiting for a
    reduction, which the asking rank issues only after the answer. So the answer is read on a stream that follows the last
    update and nothing behind it.
    """

    def __init__(self) -> None:
        self._event: torch.cuda.Event | None = None
        self._place: torch.device | None = None

    def note(self, written: torch.Tensor) -> None:
        """Note that `written` was written on the current stream. Nothing to do for memory of the host."""
        if written.is_cuda:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(written.device))
            self._event, self._place = event, written.device

    @contextmanager
    def seen(self) -> Iterator[None]:
        """A context in which copies to the host, which have to be awaited inside, see what was written."""
        if self._event is None:
            yield
            return
        stream = torch.cuda.Stream(self._place)
        stream.wait_event(self._event)
        with torch.cuda.stream(stream):
            yield
