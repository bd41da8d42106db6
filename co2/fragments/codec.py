"""Encodes rows of numbers as bytes for the wire (pure functions of tensors on the CPU).

Another codec may take its place.

Who sends keeps what the bytes leave out, and adds it to what it sends next (error feedback; Seide et al., Interspeech
2014): that is its user's, and here is only what a row becomes.

**Plain** has elements as they are. **Blockwise** has blocks of 128 elements: a scale, the largest magnitude over 127 or 7,
as fp32, and of each element the nearest whole multiple of that, in 8 or 4 bits (`comm_core/blockwise.hpp`). Bytes per
parameter, of fp32 or fp64:

    Plain 4 or 8        Blockwise, 8 bits 1.03        4 bits 0.53

The paper of Streaming DiLoCo has 4 bits, too, but as floating point with 3 bits of exponent and no scales. Neither NaN nor
infinity is lost: its block becomes NaN.
"""

from __future__ import annotations

import torch

from overlap.transport.native import blockwise_bytes, decode_blockwise, encode_blockwise

__all__ = ["Blockwise", "Codec", "codec_of"]


class Codec:
    """An encoding of rows ``[count, numel]`` of fp32 or fp64 as uint8 ``[count, nbytes(numel, dtype)]``.

    This one leaves elements as they are.
    """

    lossy = False

    def nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """The number of bytes of a row, a multiple of 4."""
        return numel * dtype.itemsize

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows as bytes, in a new tensor or the same memory."""
        return rows.contiguous().view(torch.uint8)

    def decode(self, wire: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The rows that were encoded, in a new tensor or the same memory."""
        return wire.view(dtype)


class Blockwise(Codec):
    """Symmetric linear quantization in 8 or 4 bits. A row has its scales first."""

    lossy = True

    def __init__(self, bits: int) -> None:
        self._bits = bits

    def nbytes(self, numel: int, dtype: torch.dtype) -> int:
        return blockwise_bytes(numel, self._bits)

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.stack([encode_blockwise(row.contiguous(), self._bits) for row in rows])

    def decode(self, wire: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
        rows = torch.empty(wire.shape[0], numel, dtype=dtype, device="cpu")
        for line, row in zip(wire, rows, strict=True):
            decode_blockwise(line.contiguous(), row, self._bits)
        return rows


def codec_of(bits: int | None) -> Codec:
    """The codec for elements of so many bits; None: elements as they are."""
    return Codec() if bits is None else Blockwise(bits)
