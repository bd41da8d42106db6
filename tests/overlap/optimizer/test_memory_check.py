"""Parameters that cannot be moved into buckets are refused with what they are."""

from __future__ import annotations

import pytest
import torch

from overlap.core.bucket import Slot
from overlap.optimizer.memory_check import check_memory
from overlap.plan.plan import Updates


class DTensor(torch.nn.Parameter):
    """Stands in for torch's, which needs a group of processes."""


@pytest.mark.parametrize("updates", list(Updates))
def test_a_dtensor_is_refused_by_name(updates: Updates) -> None:
    slot = Slot(0, "0.bias", DTensor(torch.ones(2)), 0)
    with pytest.raises(TypeError, match=r"'0\.bias' is a DTensor"):
        check_memory([slot], updates, 0)
