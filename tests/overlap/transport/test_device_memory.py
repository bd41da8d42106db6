"""Memory that is given back and taken again under the same tensors; streams are doubles, memory is the host's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from overlap.core.buckets.flat_buffer import FlatBuffer
from overlap.plan.partition import BucketSpec
from overlap.transport.cuda import memory, streams
from overlap.transport.cuda.memory import DeviceMemory


class _Stream:
    def __init__(self, name: str, said: list[str]) -> None:
        self.name, self._said = name, said

    def wait_stream(self, other: _Stream) -> None:
        self._said.append(f"{self.name} follows {other.name}")


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """Makes the stream of that name the current one; returns what streams have waited for since the last call."""
    said: list[str] = []
    made: dict[str, _Stream] = {}
    now = ["compute"]
    monkeypatch.setattr(memory, "_current_stream", lambda _tensor: made.setdefault(now[0], _Stream(now[0], said)))

    def switch(name: str) -> list[str]:
        found, now[0] = said[:], name
        said.clear()
        return found

    return switch


def test_tensors_stay_valid_over_memory_that_went_and_came() -> None:
    whole = torch.zeros(8)
    part, saved = whole[2:4], (whole[:4] * 1).view(2, 2)
    held = DeviceMemory(whole, zeros=True)
    held.free()
    assert whole.untyped_storage().nbytes() == 0
    held.free()
    other = torch.ones(8)
    held.take()
    assert whole.tolist() == [0] * 8
    whole.fill_(3)
    held.take()
    assert part.tolist() == [3, 3], "what is there stays"
    assert saved.tolist() == [[0, 0], [0, 0]]
    assert other.tolist() == [1] * 8


def test_on_one_stream_nothing_waits(on: Callable[[str], list[str]]) -> None:
    held = DeviceMemory(torch.zeros(4), zeros=False)
    for _ in range(2):
        held.free()
        held.take()
        held.take()
    assert on("compute") == []


def test_another_stream_follows_the_home_which_follows_it_before_the_memory_goes(
    on: Callable[[str], list[str]],
) -> None:
    held = DeviceMemory(torch.zeros(4), zeros=False)
    on("second")
    held.take()
    assert on("compute") == ["second follows compute"]
    held.free()
    assert on("compute") == ["compute follows second"]
    held.take()
    held.free()
    assert on("second") == [], "it has no part in this one"
    held.take()
    on("compute")
    held.take()
    assert on("third") == ["compute follows second"], "the memory was taken by that one"
    held.free()
    assert sorted(on("compute")) == ["second follows compute", "second follows third"]


def test_a_freed_buffer_of_a_device_has_no_memory_between_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "on_device", lambda _tensor: True)
    spec = BucketSpec((0, 1), (0, 16), 20, 32)
    buffer = FlatBuffer(spec, slice(16, 32), torch.float32, torch.device("cpu"), apart=True, freed=True, zeros=True)
    view = buffer.view(1, torch.empty(2, 2))
    buffer.shard.fill_(5)
    buffer.whole.fill_(7)
    buffer.free()
    assert not buffer.there
    assert buffer.whole.untyped_storage().nbytes() == 0
    assert buffer.shard.tolist() == [5] * 16, "shares lie apart"
    buffer.restore()
    view.fill_(1)
    assert buffer.there
    assert buffer.whole.tolist() == [0] * 16 + [1] * 4 + [0] * 12
    buffer.release()
    assert buffer.whole.numel() == 0
