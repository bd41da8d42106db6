"""What lies in a bucket: gradients told apart from marks, parameters in their places, and who has a part of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from overlap.core.bucket import Bucket, Slot
from overlap.core.gates.holders import Strangers
from overlap.core.wire import COLLECTIVES
from overlap.plan.partition import BucketSpec
from overlap.plan.plan import BucketPlan, Placement


def _bucket(*parameters: Any, placement: Placement) -> Bucket:
    slots = [Slot(number, str(number), parameter, 0) for number, parameter in enumerate(parameters)]
    offsets = tuple(sum(parameter.numel() for parameter in parameters[:number]) for number in range(len(parameters)))
    numel = sum(parameter.numel() for parameter in parameters)
    spec = BucketSpec(tuple(range(len(slots))), offsets, numel, numel)
    return Bucket(0, BucketPlan(spec, placement), slots, rank=0, world_size=1, collectives=COLLECTIVES)


def test_a_parameter_of_another_model_that_took_a_place_goes_on_with_its_value() -> None:
    """As when two models swap their weights: ``p.data, q.data = q.data, p.data``."""
    mine, other = torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        mine.weight.fill_(1.0)
        other.weight.fill_(2.0)
    bucket = _bucket(mine.weight, placement=Placement.SHARD)
    mine.weight.data, other.weight.data = other.weight.data, mine.weight.data
    bucket.adopt(Strangers())
    assert mine.weight.data_ptr() == bucket.parameters.whole.data_ptr()
    assert bool((mine.weight == 2.0).all())
    assert bool((other.weight == 1.0).all())


@pytest.mark.parametrize(
    ("counts", "placement", "expected"),
    [
        ((2, 2), Placement.SHARD, True),
        ((4, 0), Placement.SHARD, False),  # the second rank receives nothing, so its part is done when it is sent
        ((4, 0), Placement.REPLICATED, True),
    ],
)
def test_a_reduction_ends_after_all_have_come_if_each_rank_receives_some(
    counts: tuple[int, ...], placement: Placement, expected: bool
) -> None:
    slot = Slot(0, "0", torch.nn.Parameter(torch.ones(4)), 0)
    spec = BucketSpec((0,), (0,), 4, 4, counts=counts)
    for rank in range(2):
        bucket = Bucket(0, BucketPlan(spec, placement), [slot], rank=rank, world_size=2, collectives=COLLECTIVES)
        assert bucket.meets is expected
