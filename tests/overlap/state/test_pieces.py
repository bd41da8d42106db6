"""State of pieces, cut from that of whole parameters and put together again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from overlap.core.bucket import Slot
from overlap.state.pieces import assemble, beside, part_of


def _state(param: torch.Tensor) -> dict[str, Any]:
    """As Adam's."""
    return {"step": torch.tensor(3.0), "exp_avg": torch.arange(param.numel(), dtype=param.dtype).view(param.shape)}


@pytest.mark.parametrize("shape", [(), (1,), (2, 3)])
def test_what_was_cut_is_put_together_as_it_was(shape: tuple[int, ...]) -> None:
    """Also of a single number, beside which the number of steps looks alike."""
    param = torch.nn.Parameter(torch.ones(shape))
    full, numel = _state(param), param.numel()
    parts = []
    for start, stop in ((0, numel // 2), (numel // 2, numel)):
        if start < stop:
            state = part_of(full, param, start, stop, whole=False)
            assert state["step"].shape == ()
            assert state["exp_avg"].shape == (stop - start,)
            parts.append({0: (start, stop, state)})
    again = assemble([Slot(0, "0", param, 0)], parts, whole=False)
    torch.testing.assert_close(again[param], full, rtol=0, atol=0)


def test_what_was_cut_is_a_copy() -> None:
    param = torch.nn.Parameter(torch.ones(4))
    full = _state(param)
    for whole in (False, True):
        state = part_of(full, param, 0, 4, whole=whole)
        state["exp_avg"].zero_()
        state["step"].zero_()
        torch.testing.assert_close(full, _state(param), rtol=0, atol=0)


def test_state_with_dimensions_lies_beside_the_values_of_its_piece() -> None:
    state = {"step": torch.tensor(3.0), "exp_avg": torch.ones(4), "name": "a"}
    assert beside(state, torch.ones(4)) is state
    moved = beside(state, torch.empty(4, device="meta"))
    assert {key: value.device.type for key, value in moved.items() if key != "name"} == {
        "step": "cpu",
        "exp_avg": "meta",
    }
    assert moved["name"] == "a"
    assert state["exp_avg"].device.type == "cpu"
