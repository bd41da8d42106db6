"""With what training goes on where ranks were lost, or have come back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import co2
from co2.recovery.keep_going import _begin, _BroughtAlong
from overlap.job.session import current


@pytest.mark.parametrize("back", [False, True])
def test_parameters_become_the_mean_of_those_that_go_on(back: bool, tmp_path: Path) -> None:
    """All else is the first one's. `back`: the last rank has just come, with parameters that nobody has trained."""
    going_on = co2.size() - (back and co2.size() > 1)
    model = torch.nn.Linear(2, 1)
    for param in model.parameters():
        torch.nn.init.constant_(param, float(co2.rank() + 1) if co2.rank() < going_on else 1000.0)
    state = co2.elastic.TorchState(model, step=co2.rank(), elastic_dir=tmp_path)
    resets: list[int] = []
    state.register_reset_callbacks([lambda: resets.append(state.step)])
    mine = _BroughtAlong(has_state=co2.rank() < going_on)
    _begin(current(), mine, state)
    mean = (going_on + 1) / 2
    for param in model.parameters():
        torch.testing.assert_close(param.detach(), torch.full_like(param, mean))
    assert (state.step, resets, mine.has_state) == (0, [0], True)
