"""Moments of a device's streams, by events that are read when the device has passed them."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from overlap.transport.stamps import Stamp, Stamps
from overlap.transport.work import Work

__all__ = ["DeviceStamps"]


class DeviceStamps(Stamps):
    """Stamps of the stream that is current where a stamp is made.

    `on_streams`: operations, too, are on streams of the device, and over when it has passed them; else they are the host's.
    """

    launched = True

    def __init__(self, device: torch.device, *, on_streams: bool) -> None:
        self._device, self._on_streams = device, on_streams
        self._lanes: dict[object, torch.cuda.Stream] = {}  # beside all others, so that waiting there holds up nothing
        self._first = self.now()
        self._first.synchronize()
        self._began = time.perf_counter()

    def now(self) -> Stamp:
        return self._passed(torch.cuda.current_stream(self._device))

    def _passed(self, stream: torch.cuda.Stream) -> Stamp:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def over(self, work: Work, lane: object) -> Stamp | None:
        if not self._on_streams:
            return None
        if lane not in self._lanes:
            self._lanes[lane] = torch.cuda.Stream(self._device)
        work.order_before(int(self._lanes[lane].cuda_stream))
        return self._passed(self._lanes[lane])

    def reader(self) -> Callable[[Stamp], float]:
        torch.cuda.synchronize(self._device)
        return lambda event: self._began + self._first.elapsed_time(event) / 1e3
