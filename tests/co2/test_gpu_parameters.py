"""Parameters on a GPU have their outer state in the host's memory. The GPU is torch's pretence, which has no numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from co2.acco.part import AccoPart
from co2.acco.update import ShardSteps
from co2.eager_part import EagerPart
from co2.equations import Co2Rule, Eager, SparseLoCo, StreamingDiLoCo
from co2.fragments.part import OverlappedPart
from co2.fragments.sparse_part import SparsePart
from co2.fragments.streaming_part import StreamingPart
from co2.part import Part, make_parts
from overlap.core.bucket import Slot


@pytest.fixture
def _pretended(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def overwrite(tensor: torch.Tensor, values: torch.Tensor) -> None:
        """A copy from one device to another, which takes a torch that is built for both."""
        assert tensor.shape == values.shape
        assert (tensor.device.type, values.device.type) == ("cuda", "cpu") or tensor.device == values.device

    for module in ("co2.part", "co2.eager_part", "co2.fragments.part"):
        monkeypatch.setattr(f"{module}.overwrite", overwrite)
    with FakeTensorMode():
        yield


def _parts(make: Callable[..., Part]) -> tuple[list[Part], list[torch.nn.Parameter]]:
    params = [torch.nn.Parameter(torch.empty(4, 3, device="cuda", dtype=torch.bfloat16)) for _ in range(2)]
    slots = [Slot(number, f"{number}.weight", param, 0) for number, param in enumerate(params)]
    return make_parts(slots, 0, 2, make), params


def _tensors(part: Part) -> dict[str, torch.Tensor]:
    return {name: value for name, value in vars(part).items() if isinstance(value, torch.Tensor)}


def _acco(*arguments: Any) -> AccoPart:
    slots = arguments[0]
    return AccoPart(ShardSteps(torch.optim.SGD([slot.param for slot in slots], 0.1)), *arguments)


@pytest.mark.usefixtures("_pretended")
@pytest.mark.parametrize(
    "make",
    [
        partial(Part, Co2Rule()),
        partial(EagerPart, Eager(), 0.5),
        partial(StreamingPart, StreamingDiLoCo()),
        partial(SparsePart, SparseLoCo()),
        _acco,
    ],
    ids=["co2", "eager", "streaming-diloco", "sparseloco", "acco"],
)
def test_a_round_goes_through_the_hosts_memory(make: Callable[..., Part]) -> None:
    (part,), params = _parts(make)
    if isinstance(part, AccoPart):
        for param in params:
            param.grad = torch.empty_like(param)
        part.accumulate()
    part.turn((), ())
    if isinstance(part, OverlappedPart):
        part.apply((0, 1))
    part.unpack(())
    part.load_average()
    found = _tensors(part)
    assert "whole" in found
    assert {name: value.device.type for name, value in found.items() if value.device.type != "cpu"} == {}
    assert all(param.device.type == "cuda" for param in params)
