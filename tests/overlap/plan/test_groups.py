"""Buckets that the user asked for."""

from __future__ import annotations

import pytest
import torch

from overlap.core.bucket import Slot
from overlap.optimizer.arguments import parse_groups
from overlap.plan.groups import members_of, plan_groups
from overlap.plan.partition import TensorSpec, per_tensor
from overlap.plan.plan import Facts, replicated


@pytest.mark.parametrize(
    ("asked", "members"),
    [(1, [[2, 0, 1]]), (2, [[2, 0], [1]]), (3, [[2], [0], [1]]), (10**9, [[2], [0], [1]])],
)
def test_a_number_of_groups_divides_the_order_of_arrival(asked: int, members: list[list[int]]) -> None:
    """Where there are fewer parameters than groups, each is alone; nothing is made for the groups without any."""
    slots = [Slot(index, str(index), torch.nn.Parameter(torch.ones(1)), 0) for index in range(3)]
    facts = Facts(units=(), arrivals=(2, 0, 1), fires=(1, 1, 1), unseen=frozenset(), idle=frozenset())
    for groups in (parse_groups(asked, None, slots), parse_groups(0, asked, slots)):
        assert groups == min(asked, len(slots))
        assert members_of(groups, facts) == members


def test_a_group_is_issued_once_its_last_gradient_is_there() -> None:
    facts = Facts(units=(), arrivals=(2, 1, 0), fires=(1, 1, 1), unseen=frozenset(), idle=frozenset())
    specs = [TensorSpec(1, 4)] * 3
    rest = replicated(per_tensor([1], specs, 2))
    plan = plan_groups([[2, 0]], rest, facts, specs, [True] * 3, 2)
    assert [bucket.spec.tensors for bucket in plan] == [(1,), (2, 0)]
    assert [bucket.sharded for bucket in plan] == [False, True]
