"""Which optimizers count as which: a subclass that changes nothing of the update is its base."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from overlap.state.elementwise import decides_by_loss, is_elementwise, is_per_parameter


class Renamed(torch.optim.AdamW):
    """A name of one's own, and defaults."""

    def __init__(self, params: Any, lr: float = 1e-4) -> None:
        super().__init__(params, lr=lr, weight_decay=0.1)


class RenamedAgain(Renamed):
    pass


class Stepping(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return super().step(closure)


class SteppingBelow(Stepping):
    pass


class OtherRule(torch.optim.Adam):
    def _init_group(self, *args: Any, **kwargs: Any) -> Any:
        return super()._init_group(*args, **kwargs)


class FromScratch(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})


@pytest.mark.parametrize("steps", [False, True])  # torch wraps step() of a class when it is first made
@pytest.mark.parametrize(
    ("kind", "known"),
    [
        (torch.optim.AdamW, True),
        (Renamed, True),
        (RenamedAgain, True),
        (Stepping, False),
        (SteppingBelow, False),
        (OtherRule, False),
        (FromScratch, False),
    ],
)
def test_a_subclass_counts_as_its_base_if_it_updates_as_it_does(kind: Any, known: bool, steps: bool) -> None:
    for _ in range(1 + steps):
        optimizer = kind([torch.nn.Parameter(torch.ones(3))])
    assert is_elementwise(optimizer) is known
    assert is_per_parameter(optimizer) is known
    assert decides_by_loss(optimizer) is not known


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, Renamed])
def test_a_graph_through_whole_parameters_is_not_cut(kind: Any) -> None:
    optimizer = kind([torch.nn.Parameter(torch.ones(3))])
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))], "differentiable": True})
    assert not is_elementwise(optimizer)
    assert not is_per_parameter(optimizer)
