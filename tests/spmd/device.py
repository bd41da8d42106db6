"""``DEAR_TEST_DEVICE``: where the tensors of these suites lie.

cuda        what tests make without saying where is made on the GPU; `bench.gpu` runs the suites so
pretended   memory of the host that is taken for a device's: every optimizer sends over carriers, and backward passes run
            on a thread of their own, as those of a device do
(nothing)   on the host
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from overlap.job import devices
from overlap.transport.cuda import streams
from overlap.transport.cuda.route import Facts
from overlap.transport.cuda.streams import Moment
from overlap.transport.stamps import Stamps
from tests.spmd.host_random import HostRandom

__all__ = ["DEVICE", "Late", "PlainStreams", "host_only", "is_free", "pretend", "use_device"]

DEVICE = os.environ.get("DEAR_TEST_DEVICE", "")

#: Tests by what is in their name, and why they are none for tensors of a device.
_HOST_ONLY = {
    "test_communicator": "communicators of the host move its tensors",
    "test_device_carriers.py": "pretends a device itself",
    "test_offload.py": "pretends a device itself",
    "test_event_order.py": "operations on tensors of a device are issued by carriers",
    "test_examples.py": "the examples choose their device themselves",
    "bytescheduler": "refuses models on a GPU",
    "test_co2": "their simulations are on the host",
}
_NOT_PRETENDED = {
    "test_profiler.py": "backward passes run on a thread that torch's profiler does not look at",
}


def host_only(test: str) -> str | None:
    """Why the test of this name is not run on a device (pure); None where it is."""
    reasons = _HOST_ONLY if DEVICE == "cuda" else _HOST_ONLY | _NOT_PRETENDED
    return next((reason for part, reason in reasons.items() if part in test), None)


class Late:
    """A moment that a device passes when somebody has waited for it for a while."""

    def __init__(self) -> None:
        self._passed = False

    def done(self) -> bool:
        return self._passed

    def wait(self) -> None:
        time.sleep(1e-4)
        self._passed = True

    def order_before(self, stream: int) -> None:
        raise AssertionError("nothing on a stream needs a copy on the host")


class Brought(Late):
    """As :class:`Late`, of a copy that streams wait for."""

    def order_before(self, stream: int) -> None:
        pass


class PlainStreams:
    """`overlap.transport.cuda.streams.Streams` of a device that is the host; counts what is copied."""

    kind = "cpu"
    side = 0
    copied = 0

    def __init__(self, device: torch.device) -> None:
        self.device = 0

    def current(self) -> int:
        return 0

    def bind(self) -> None:
        pass

    def follow(self, others: Iterable[int]) -> None:
        raise AssertionError("there is one stream")

    def capturing(self) -> bool:
        return False

    def beside(self, compute: Callable[[], None], touched: Sequence[torch.Tensor]) -> None:
        compute()

    @contextmanager
    def aside(self) -> Iterator[None]:
        yield

    def scratch(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype)

    def mark(self) -> Any:
        raise AssertionError("nothing is beside the host")

    def stamps(self, *, on_streams: bool) -> Stamps:
        return Stamps()

    def pinned(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(like.numel(), dtype=like.dtype)

    def fetch(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Moment:
        for host, there in pairs:
            host.copy_(there, non_blocking=True)
        return Late()

    def put(self, there: torch.Tensor, host: torch.Tensor) -> Moment:
        there.copy_(host)
        return Brought()

    def bring(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], stream: int | None) -> None:
        for there, host in pairs:
            PlainStreams.copied += 1
            there.copy_(host)


def is_free(tensor: torch.Tensor) -> bool:
    """Whether the memory of a freed buffer is given back: it has none on a device, and reads as zeros on the host."""
    return not tensor.untyped_storage().nbytes() or not bool(tensor.any())


def pretend(patch: pytest.MonkeyPatch) -> None:
    """Take the host's memory for a device's, until `patch` is undone."""

    def facts(_parameters: Sequence[tuple[str, torch.Tensor]], refusal: str) -> Facts:
        return Facts() if refusal else Facts("cuda", "a card", trouble="pretended")

    patch.setattr(devices, "Streams", PlainStreams)
    patch.setattr(streams, "on_device", lambda _tensor: True)
    patch.setattr(devices, "_facts", facts)
    backward = torch.autograd.backward

    def backward_on_a_thread(*arguments: Any, **named: Any) -> None:
        failures: list[BaseException] = []

        def run() -> None:
            try:
                backward(*arguments, **named)
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        if failures:
            raise failures[0]

    patch.setattr(torch.autograd, "backward", backward_on_a_thread)
    PlainStreams.copied = 0


def use_device() -> None:
    """From now on tensors are made on this rank's GPU, or where it is pretended; random numbers are the host's."""
    place = torch.device("cpu")
    if DEVICE == "cuda":
        local = int(os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", os.environ.get("LOCAL_RANK", "0")))
        place = torch.device("cuda", local % torch.cuda.device_count())
        torch.cuda.set_device(place)
    torch.set_default_device(place)
    HostRandom(place).__enter__()  # for good
