"""The user's optimizer on shards, on the thread of a round."""

from __future__ import annotations

import pytest
import torch

from co2.acco.update import OwnedPiece, ShardSteps
from overlap.core.bucket import Slot


def _steps(optimizer: torch.optim.Optimizer) -> tuple[ShardSteps, OwnedPiece]:
    param = optimizer.param_groups[0]["params"][0]
    return ShardSteps(optimizer), OwnedPiece(Slot(0, "weight", param, 0), 0, 2, {})


def test_a_rate_that_changes_while_a_round_is_on_its_way_is_the_next_ones() -> None:
    rate = torch.tensor(0.5)
    steps, piece = _steps(torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=rate))
    steps.note()
    rate.zero_()  # as schedulers do with tensors
    values = torch.ones(2)
    steps({piece: (values, torch.tensor([1.0, 2.0]))})
    assert values.tolist() == [0.5, 0.0]


@pytest.mark.parametrize("forget", [False, True])
def test_an_estimate_leaves_the_state_as_it_was(forget: bool) -> None:
    steps, piece = _steps(torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1.0, momentum=0.5))
    steps.note()
    for first in (True, False):
        steps({piece: (torch.zeros(2), torch.ones(2))}, forget=forget and not first)
    assert piece.state["momentum_buffer"].tolist() == ([1.0, 1.0] if forget else [1.5, 1.5])


class _Counting(torch.optim.SGD):
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        super().step()
        self.param_groups[0]["steps"] = self.param_groups[0].get("steps", 0) + 1


def test_an_optimizer_that_counts_in_its_groups_is_refused() -> None:
    steps, piece = _steps(_Counting([torch.nn.Parameter(torch.zeros(2))], lr=1.0))
    steps.note()
    with pytest.raises(
        RuntimeError, match=r"_Counting\.step\(\) wrote 'steps' of parameter group 0, and acco steps twice"
    ):
        steps({piece: (torch.ones(2), torch.ones(2))})
