"""What updates an optimizer and a compression leave possible."""

from __future__ import annotations

import pytest
import torch

from overlap.optimizer.arguments import feasible
from overlap.plan.plan import Updates
from overlap.transport.compression import Compression, Compressor

OPTIMIZER = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])


@pytest.mark.parametrize(
    ("wished", "elementwise", "compression", "expected"),
    [
        (Updates.SHARDED, True, Compression.none, Updates.SHARDED),
        (Updates.SHARDED, True, Compression.bf16, Updates.SHARDED),
        (Updates.SHARDED, False, Compression.none, Updates.WHOLE),
        (Updates.SHARDED, True, Compressor, Updates.WHOLE),
        (Updates.OWNED, False, Compression.none, Updates.WHOLE),
        (Updates.DEFERRED, True, Compressor, Updates.DEFERRED),
        (Updates.DEFERRED, False, Compression.none, Updates.WHOLE),
        (Updates.WHOLE, True, Compression.none, Updates.WHOLE),
        (Updates.EAGER, True, Compression.fp16, Updates.EAGER),
    ],
)
def test_wishes_give_way_to_what_needs_whole_tensors(wished, elementwise, compression, expected):
    assert feasible(wished, OPTIMIZER, elementwise, compression) is expected


def test_whole_parameters_are_updated_by_owners_where_that_is_all_an_optimizer_needs():
    assert feasible(Updates.OWNED, OPTIMIZER, False, Compression.fp16, per_parameter=True) is Updates.OWNED
    assert feasible(Updates.OWNED, OPTIMIZER, False, Compressor, per_parameter=True) is Updates.WHOLE
    assert feasible(Updates.SHARDED, OPTIMIZER, False, Compression.none, per_parameter=True) is Updates.WHOLE


@pytest.mark.parametrize(("elementwise", "compression"), [(False, Compression.none), (True, Compressor)])
def test_what_the_user_asked_for_is_refused_instead(elementwise, compression):
    with pytest.raises(ValueError, match="eager=True"):
        feasible(Updates.EAGER, OPTIMIZER, elementwise, compression)
