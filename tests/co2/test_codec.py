"""What travels of a fragment, as bytes."""

from __future__ import annotations

import math

import pytest
import torch

from co2.fragments.codec import Blockwise, Codec, codec_of

CODECS = {None: codec_of(None), 8: codec_of(8), 4: codec_of(4)}


def _by_torch(row: torch.Tensor, bits: int) -> torch.Tensor:
    """The bytes of a row, by the definition."""
    most, blocks = 2 ** (bits - 1) - 1, -(-row.numel() // 128)
    padded = torch.nn.functional.pad(row, (0, 128 * blocks - row.numel())).view(blocks, 128)
    scales = (padded.abs().amax(1) / most).to(torch.float32)
    units = torch.where(scales > 0, scales, 1.0).to(row.dtype).unsqueeze(1)
    codes = (padded / units).round().clamp(-most, most).to(torch.int8).flatten()[: row.numel()]
    if bits == 8:
        packed = codes.view(torch.uint8)
    else:
        halves = torch.nn.functional.pad(codes + 8, (0, codes.numel() % 2), value=8).to(torch.uint8)
        packed = halves[0::2] | halves[1::2] << 4
    return torch.cat((scales.view(torch.uint8), packed, torch.zeros(-packed.numel() % 4, dtype=torch.uint8)))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e-44, 1e-30, 1.0, 1e30])
def test_bytes_are_those_of_the_definition(bits: int, dtype: torch.dtype, size: float) -> None:
    torch.manual_seed(0)
    for numel in (1, 2, 5, 127, 128, 129, 1000, 4097):
        rows = size * torch.randn(2, numel, dtype=dtype)
        rows[0, ::3] = size * torch.randint(-7, 8, rows[0, ::3].shape).to(dtype) / 2  # of which some are in the middle
        wire = CODECS[bits].encode(rows)
        for row, line in zip(rows, wire, strict=True):
            assert torch.equal(line, _by_torch(row, bits)), numel


def _there_and_back(codec: Codec, rows: torch.Tensor) -> torch.Tensor:
    wire = codec.encode(rows)
    assert wire.dtype is torch.uint8
    assert wire.shape == (rows.shape[0], codec.nbytes(rows.shape[1], rows.dtype))
    return codec.decode(wire, rows.shape[1], rows.dtype)


@pytest.mark.parametrize("bits", list(CODECS))
@pytest.mark.parametrize("numel", [1, 8, 127, 128, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_comes_back_is_within_half_a_step(bits: int | None, numel: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows = torch.randn(3, numel, dtype=dtype) * torch.tensor([[1e-6], [1.0], [1e6]], dtype=dtype)
    back = _there_and_back(CODECS[bits], rows)
    assert back.dtype is dtype
    if bits is None:
        assert torch.equal(back, rows)
        return
    for row, other in zip(rows, back, strict=True):
        for block, decoded in zip(row.split(128), other.split(128), strict=True):
            step = block.abs().max() / (2 ** (bits - 1) - 1)
            assert (block - decoded).abs().max() <= 0.5001 * step
            assert (block - decoded).abs().max() > 0.01 * step or block.numel() == 1


def test_by_hand() -> None:
    rows = torch.tensor([[7.0, -7.0, 3.4, 0.6, -0.4, 0.0]])
    codec = Blockwise(4)
    assert _there_and_back(codec, rows).tolist() == [[7.0, -7.0, 3.0, 1.0, 0.0, 0.0]]
    # the scale, 1.0; then two codes in a byte, 8 above their values, the first one below; filled up to 4 bytes
    assert codec.encode(rows).tolist() == [[0, 0, 128, 63, 15 + 16 * 1, 11 + 16 * 9, 8 + 16 * 8, 0]]
    assert _there_and_back(Blockwise(8), 127 * rows / 7).tolist() == [[127.0, -127.0, 62.0, 11.0, -7.0, 0.0]]


def test_bytes_per_parameter() -> None:
    size = 1280
    sizes = [codec.nbytes(size, torch.float32) / size for codec in CODECS.values()]
    assert sizes == [4, 1 + 4 / 128, 0.5 + 4 / 128]
    assert CODECS[None].nbytes(10, torch.float64) == 80


@pytest.mark.parametrize("bits", [8, 4])
def test_nothing_is_nothing_and_what_is_no_number_stays_none(bits: int) -> None:
    rows = torch.zeros(2, 200)
    assert torch.equal(_there_and_back(CODECS[bits], rows), rows)
    tiny = torch.full((1, 3), 1e-45)
    assert torch.isfinite(_there_and_back(CODECS[bits], tiny)).all()
    for value in (math.nan, math.inf):
        rows[0, 150] = value
        back = _there_and_back(CODECS[bits], rows)
        assert back[0, 128:].isnan().all()
        assert torch.equal(back[0, :128], rows[0, :128]), "its block alone"
        assert torch.equal(back[1], rows[1])


@pytest.mark.parametrize("bits", [8, 4])
def test_with_feedback_nothing_is_lost_for_good(bits: int) -> None:
    """After n turns, what was sent differs from what was meant by one turn's remainder."""
    torch.manual_seed(0)
    meant, sent, left = torch.zeros(1, 40), torch.zeros(1, 40), torch.zeros(1, 40)
    small = torch.full((1, 40), 0.01)
    small[0, 0] = 1.0  # beside which the others are below half a step of 4 bits
    for _ in range(50):
        meant += small
        said = _there_and_back(CODECS[bits], small + left)
        left = small + left - said
        sent += said
    torch.testing.assert_close(sent + left, meant)
    assert left.abs().max() < 0.2
    assert sent[0, 1] > 0.3, "it was sent in the end"
