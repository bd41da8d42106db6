"""ByteScheduler's plan: a bucket per layer, numbered by urgency; partitions cover a bucket, flat and aligned."""

from __future__ import annotations

import pytest

from bytescheduler_adapter.schedule import partitions, plan_buckets
from overlap.plan.partition import TensorSpec
from overlap.plan.plan import Facts


def test_buckets_are_layers_in_the_order_of_use_idle_ones_last() -> None:
    specs = [TensorSpec(100, 4, "fp32")] * 5
    facts = Facts(((3, 4), (0,), (1, 2)), (2, 1, 0, 4, 3), (1,) * 5, frozenset(), frozenset({3}))
    plan = plan_buckets(facts, specs, 2)
    assert [bucket.spec.tensors for bucket in plan] == [(4,), (0,), (1, 2), (3,)]
    assert not any(bucket.sharded for bucket in plan)


@pytest.mark.parametrize("numel", [1, 15, 16, 17, 1000, 4096, 100_003])
@pytest.mark.parametrize("itemsize", [2, 4, 8])
@pytest.mark.parametrize("limit", [1, 64, 1000, 4096, 2**30])
def test_partitions_cover_a_bucket_once(numel: int, itemsize: int, limit: int) -> None:
    spans = partitions(numel, itemsize, limit)
    assert [index for span in spans for index in range(span.start, span.stop)] == list(range(numel))
    assert all(span.start * itemsize % 64 == 0 for span in spans)
    assert all((span.stop - span.start) * itemsize <= max(limit, 64) for span in spans)
    sizes = [span.stop - span.start for span in spans]
    assert max(sizes) == sizes[0]
