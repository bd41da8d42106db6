"""Which rows a rank has of a DTensor: torch's chunks."""

from __future__ import annotations

import pytest
import torch

from overlap.state.dtensors import rows_of


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("count", [0, 1, 2, 5, 6, 8, 101])
def test_rows_are_torchs_chunks(count: int, size: int) -> None:
    every = torch.arange(count)
    chunks = [*torch.chunk(every, size), *[every[:0]] * size][:size] if count else [every] * size
    for rank, chunk in enumerate(chunks):
        start, stop = rows_of(count, rank, size)
        assert torch.equal(every[start:stop], chunk)
