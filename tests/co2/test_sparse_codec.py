"""What travels of the largest elements, as bytes."""

from __future__ import annotations

import math

import pytest
import torch

from co2.fragments.sparse_codec import CHUNK, SparseCodec


def _there_and_back(codec: SparseCodec, vector: torch.Tensor) -> torch.Tensor:
    wire = codec.encode(vector)
    assert wire.dtype is torch.uint8
    assert wire.shape == (codec.nbytes(vector.numel(), vector.dtype),)
    return codec.decode(wire, vector.numel(), vector.dtype)


@pytest.mark.parametrize("numel", [0, 1, 63, 64, 65, 4095, 4096, 4097, 10_000])
@pytest.mark.parametrize("top_k", [1, 3, 64, 4096])
@pytest.mark.parametrize("bits", [2, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_largest_of_each_chunk_come_back(numel: int, top_k: int, bits: int | None, dtype: torch.dtype) -> None:
    torch.manual_seed(numel)
    vector = torch.randn(numel, dtype=dtype)
    back = _there_and_back(SparseCodec(top_k, bits), vector)
    assert back.dtype is dtype
    for chunk, decoded in zip(vector.split(CHUNK), back.split(CHUNK), strict=True):
        kept = max(1, math.ceil(top_k * chunk.numel() / CHUNK))
        largest = chunk.abs().argsort(descending=True)[:kept]
        wanted = torch.zeros_like(chunk)
        wanted[largest] = chunk[largest]
        if bits is None:
            assert torch.equal(decoded, wanted)
            continue
        assert torch.equal(decoded.sign(), wanted.sign())
        sizes = wanted[largest].abs()
        mean = sizes.mean()
        for group in (sizes > mean, sizes <= mean):
            found = decoded[largest].abs()[group]
            torch.testing.assert_close(found, sizes[group].mean().expand_as(found), rtol=1e-6, atol=0)


def test_several_are_added() -> None:
    torch.manual_seed(0)
    vectors, codec = torch.randn(3, 5000), SparseCodec(64, 2)
    total = torch.zeros(5000)
    for vector in vectors:
        codec.add(codec.encode(vector), total)
    said = [_there_and_back(codec, vector) for vector in vectors]
    assert torch.equal(total, said[0] + said[1] + said[2])


def test_by_hand() -> None:
    vector = torch.zeros(CHUNK)
    vector[[1, 258, 4095]] = torch.tensor([3.0, -1.0, 2.0])
    codec = SparseCodec(3, 2)
    assert codec.nbytes(CHUNK, torch.float32) == 6 + 8 + 1
    # 1 and 258, that is 0x102; 4095 and nothing; the magnitudes 1.5 and 3.0; codes 01, 10, 00 from the lowest bits on
    assert codec.encode(vector).tolist() == [
        1,
        0x20,
        0x10,
        255,
        15,
        0,
        *(0, 0, 192, 63),
        *(0, 0, 64, 64),
        0b00_00_10_01,
    ]
    back = _there_and_back(codec, vector)
    assert back[[1, 258, 4095]].tolist() == [3.0, -1.5, 1.5]
    assert int(back.count_nonzero()) == 3


def test_bytes_per_parameter() -> None:
    assert SparseCodec(64, 2).nbytes(CHUNK, torch.float32) == 120
    assert SparseCodec(64, None).nbytes(CHUNK, torch.float32) == 64 * 5.5
    assert SparseCodec(64, 2).nbytes(64, torch.float32) == 3 + 8 + 1, "one element of a small parameter"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_stays_none(value: float) -> None:
    vector = torch.zeros(2 * CHUNK)
    assert torch.equal(_there_and_back(SparseCodec(8, 2), vector), vector)
    vector[5], vector[CHUNK + 5] = value, 1.0
    back = _there_and_back(SparseCodec(8, 2), vector)
    assert not torch.isfinite(back[5])
    assert torch.equal(back[CHUNK:], vector[CHUNK:]), "its chunk alone"


def test_with_feedback_everything_is_sent_in_the_end() -> None:
    torch.manual_seed(0)
    small, codec = torch.rand(256) + 0.5, SparseCodec(64, 2)  # 4 of 256
    sent, left = torch.zeros(256), torch.zeros(256)
    for _ in range(300):
        said = _there_and_back(codec, small + left)
        left = small + left - said
        sent += said
    torch.testing.assert_close(sent + left, 300 * small, rtol=1e-4, atol=1e-2)
    assert left.abs().max() < 200, "of 300 that were meant"
    assert (sent > 0).all()
