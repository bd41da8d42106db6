"""Encodes the largest elements of a vector as bytes (pure functions of tensors).

A vector is cut into chunks of 4,096 elements, the last one shorter; of each the `top_k` in 4,096 with the largest
magnitudes travel, in a shorter chunk as large a share of it, at least one. Chunks and top-k are those of SparseLoCo (Sarfi
et al., arXiv 2508.15706, section 3), whose chunks are squares of matrices. In 2 bits an element is its sign and which of
the chunk's two magnitudes it has: the mean of the kept ones above their mean, or of the others. That is our choice.

    a chunk     indices, 12 bits each, two in 3 bytes; then 2 bits each and two magnitudes of fp32, or the elements

64 of 4,096 in 2 bits are 120 bytes for 4,096 elements: 137 times less than fp32. NaN and infinity are among the largest,
and make their chunk NaN in 2 bits.
"""

from __future__ import annotations

import torch

__all__ = ["CHUNK", "SparseCodec"]

CHUNK = 4096
_MAGNITUDE_BYTES = 8  # two of fp32


class SparseCodec:
    """An encoding of the largest elements of fp32 or fp64 vectors as uint8, :meth:`nbytes` long.

    `bits` is 2, or None: as they are.
    """

    def __init__(self, top_k: int, bits: int | None) -> None:
        self._top_k, self._bits = top_k, bits

    def _kept(self, chunk: int) -> int:
        return max(1, -(-self._top_k * chunk // CHUNK))

    def _cut(self, numel: int) -> list[tuple[int, int, int]]:
        """Chunks of one size each: how many, of how many elements, of which how many travel."""
        whole, rest = divmod(numel, CHUNK)
        return [(n, size, self._kept(size)) for n, size in ((whole, CHUNK), (1, rest)) if n and size]

    def _chunk_bytes(self, kept: int, dtype: torch.dtype) -> int:
        values = kept * dtype.itemsize if self._bits is None else _MAGNITUDE_BYTES + -(-kept // 4)
        return -(-kept // 2) * 3 + values

    def nbytes(self, numel: int, dtype: torch.dtype) -> int:
        return sum(n * self._chunk_bytes(kept, dtype) for n, _, kept in self._cut(numel))

    def encode(self, vector: torch.Tensor) -> torch.Tensor:
        wires, begin = [], 0
        for n, size, kept in self._cut(vector.numel()):
            chunks = vector[begin : begin + n * size].view(n, size)
            begin += n * size
            indices = chunks.abs().topk(kept, dim=1, sorted=False).indices.sort(dim=1).values
            values = chunks.gather(1, indices)
            wires.append(torch.cat((_packed_indices(indices), self._packed_values(values)), dim=1).view(-1))
        return torch.cat(wires) if wires else torch.empty(0, dtype=torch.uint8, device=vector.device)

    def decode(self, wire: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The vector, with zeros for elements that did not travel."""
        vector = torch.zeros(numel, dtype=dtype, device=wire.device)
        self.add(wire, vector)
        return vector

    def add(self, wire: torch.Tensor, total: torch.Tensor) -> None:
        """Add what travelled to `total`, a vector; the rest of it is not touched."""
        begin, read = 0, 0
        for n, size, kept in self._cut(total.numel()):
            nbytes, head = self._chunk_bytes(kept, total.dtype), -(-kept // 2) * 3
            rows = wire[read : read + n * nbytes].view(n, nbytes)
            values = self._unpacked_values(rows[:, head:], kept, total.dtype)
            indices = _unpacked_indices(rows[:, :head], kept)
            total[begin : begin + n * size].view(n, size).scatter_add_(1, indices, values)
            begin, read = begin + n * size, read + n * nbytes

    def _packed_values(self, values: torch.Tensor) -> torch.Tensor:
        if self._bits is None:
            return values.contiguous().view(torch.uint8)
        sizes = values.abs()
        large = sizes > sizes.mean(1, keepdim=True)
        both = [_mean_of(sizes, ~large), _mean_of(sizes, large)]
        codes = large.to(torch.uint8) | (values.signbit().to(torch.uint8) << 1)
        quarters = torch.nn.functional.pad(codes, (0, -codes.shape[1] % 4)).view(codes.shape[0], -1, 4)
        packed = quarters[..., 0] | quarters[..., 1] << 2 | quarters[..., 2] << 4 | quarters[..., 3] << 6
        return torch.cat((torch.stack(both, 1).to(torch.float32).view(torch.uint8), packed), dim=1)

    def _unpacked_values(self, rows: torch.Tensor, kept: int, dtype: torch.dtype) -> torch.Tensor:
        if self._bits is None:
            return _copied(rows).view(dtype)
        magnitudes = _copied(rows[:, :_MAGNITUDE_BYTES]).view(torch.float32).to(dtype)
        packed = rows[:, _MAGNITUDE_BYTES:]
        codes = torch.stack([packed >> shift & 3 for shift in (0, 2, 4, 6)], -1).view(rows.shape[0], -1)[:, :kept]
        sizes = magnitudes.gather(1, (codes & 1).long())
        return torch.where(codes > 1, -sizes, sizes)


def _copied(rows: torch.Tensor) -> torch.Tensor:
    """In memory of their own, from which numbers of several bytes may be read."""
    return rows.clone(memory_format=torch.contiguous_format)


def _mean_of(sizes: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
    """Of each row, of those elements; 0 where there are none, NaN where one is no number or too large for one."""
    count = which.sum(1).clamp(min=1)
    mean = torch.where(which, sizes, 0.0).sum(1) / count
    return torch.where(sizes.isfinite().all(1), mean, torch.nan)


def _packed_indices(indices: torch.Tensor) -> torch.Tensor:
    """Rows of numbers below 4,096 as bytes, two numbers in three."""
    pairs = torch.nn.functional.pad(indices, (0, indices.shape[1] % 2)).view(indices.shape[0], -1, 2)
    low, high = pairs[..., 0], pairs[..., 1]
    parts = (low & 255, low >> 8 | (high & 15) << 4, high >> 4)
    return torch.stack(parts, -1).view(indices.shape[0], -1).to(torch.uint8)


def _unpacked_indices(rows: torch.Tensor, count: int) -> torch.Tensor:
    triples = rows.long().view(rows.shape[0], -1, 3)
    low = triples[..., 0] | (triples[..., 1] & 15) << 8
    high = triples[..., 1] >> 4 | triples[..., 2] << 4
    return torch.stack((low, high), -1).view(rows.shape[0], -1)[:, :count]
