"""What tensors become on the wire, and what comes back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from overlap.transport.compression import Compression

KINDS = {"none": None, "fp16": torch.float16, "bf16": torch.bfloat16}


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
)
@pytest.mark.parametrize("kind", KINDS)
def test_floats_travel_narrow_and_all_come_back_in_their_type(kind: str, dtype: torch.dtype) -> None:
    compressor: Any = getattr(Compression, kind)
    tensor = torch.tensor([1, 0, 1]).to(dtype)
    sent, context = compressor.compress(tensor)
    narrows = KINDS[kind] is not None and dtype.is_floating_point
    assert sent.dtype is (KINDS[kind] if narrows else dtype)
    back = compressor.decompress(sent, context)
    assert back.dtype is dtype
    assert torch.equal(back, tensor)
