"""The memory of flat buffers, as Linux counts it."""

from __future__ import annotations

import pytest
import torch

from overlap.core.buckets.flat_buffer import FlatBuffer
from overlap.job.memory.counted import resident_bytes
from overlap.plan.partition import BucketSpec

MB = 2**20


def test_freed_buffers_that_end_behind_a_large_page_take_no_more_than_they_have() -> None:
    numel = (4 * MB + 4096) // 4
    spec = BucketSpec((0,), (0,), numel, numel)
    buffers = [FlatBuffer(spec, slice(0, 0), torch.float32, torch.device("cpu"), freed=True) for _ in range(24)]
    before = resident_bytes()
    for turn in range(4):
        for place, buffer in enumerate(buffers):
            if (7 * place + turn) % 3:
                buffer.restore()
                buffer.whole.fill_(1.0)
            else:
                buffer.free()
        there = sum(buffer.whole.nbytes for buffer in buffers if buffer.there)
        assert resident_bytes() - before == pytest.approx(there, rel=0.02, abs=2 * MB)
