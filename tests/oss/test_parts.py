"""What owners send each other, part by part."""

from __future__ import annotations

import pytest
import torch

from oss import parts
from oss.parts import parts_of


def _sent(sizes: list[int], owners: list[int]) -> list[tuple[int, list[int]]]:
    """Of each part its owner, and which parameters are in it, of so many elements of 4 bytes each."""
    parameters = [torch.zeros(size) for size in sizes]
    numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
    found = parts_of(parameters, dict(zip(parameters, owners, strict=True)), False)
    return [(part.owner, [numbers[id(parameter)] for parameter in part.parameters]) for part in found]


def test_a_part_holds_what_fits_into_it_or_one_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "_LARGEST", 40)
    assert _sent([5, 5, 1, 9, 2, 0, 30, 1], [0] * 8) == [(0, [0, 1]), (0, [2, 3]), (0, [4]), (0, [6]), (0, [7])]


def test_owners_send_their_parts_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "_LARGEST", 40)
    assert _sent([10, 10, 10, 10, 10, 10], [0, 0, 0, 1, 1, 2]) == [
        *((0, [0]), (1, [3]), (2, [5])),
        *((0, [1]), (1, [4])),
        (0, [2]),
    ]


@pytest.mark.parametrize("rounds", [False, True])
def test_parameters_of_all_types_travel_together(rounds: bool) -> None:
    """Each comes back in its type; with `rounds`, what is wider than float16 was rounded to it."""
    torch.manual_seed(0)
    dtypes = [torch.float16, torch.float64, torch.bfloat16, torch.float32, torch.complex64]
    values = [torch.randn(3, 3, dtype=dtype).t() for dtype in dtypes]
    targets = [torch.zeros_like(value) for value in values]
    (source,) = parts_of(values, dict.fromkeys(values, 1), rounds)
    (target,) = parts_of(targets, dict.fromkeys(targets, 1), rounds)
    buffer = target.room()
    buffer.copy_(source.packed())
    target.unpack(buffer)
    for found, value in zip(targets, values, strict=True):
        narrowed = rounds and value.dtype in (torch.float32, torch.float64)
        assert torch.equal(found, value.half().to(value.dtype) if narrowed else value)
