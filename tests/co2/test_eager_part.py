"""The parts of a rank that makes outer steps of its own: what a checkpoint has of them."""

from __future__ import annotations

import torch

from co2.eager_part import EagerPart
from co2.equations import Eager
from co2.part import make_parts
from overlap.core.bucket import Slot


def _part(values: torch.Tensor, weight: float) -> tuple[EagerPart, torch.nn.Parameter]:
    param = torch.nn.Parameter(values.clone())
    (part,) = make_parts(
        [Slot(0, "weight", param, 0)], 0, 1, lambda *arguments: EagerPart(Eager(0.5, 0.9), weight, *arguments)
    )
    assert isinstance(part, EagerPart)
    return part, param


def test_what_arrives_late_counts_the_same_with_other_numbers_of_ranks() -> None:
    """It is the others' part, whatever the weight of whoever takes it over."""
    start = torch.tensor([3.0, 1.0])
    part, param = _part(start, weight=0.5)
    param.data -= torch.tensor([1.0, 2.0])
    part.turn((), ())
    part.whole[:2].copy_(torch.tensor([4.0, 4.0]))  # the mean, so that the others' part is 4 - 1/2 and 4 - 2/2
    resumed, other = _part(torch.zeros(2), weight=0.25)
    other.data.copy_(param.data)
    resumed.load(part.complete())
    for each, its in ((part, param), (resumed, other)):
        began, momentum = each.start[:2].clone(), each.momentum[:2].clone()
        each.turn((), ())  # with no progress of its own
        late = torch.tensor([3.5, 3.0])
        torch.testing.assert_close(each.momentum[:2], 0.9 * momentum + late)
        torch.testing.assert_close(its.data, began - 0.5 * (late + 0.9 * each.momentum[:2]))
