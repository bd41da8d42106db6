"""A part under "sparseloco" (`co2.equations`).

One operation carries a round: an all-gather of each rank's progress, as bytes of `co2.fragments.sparse_codec`, parameter by
parameter. Every rank decodes them one after the other, in the order of ranks, and sums in the outer state's own type
(fp32): so all move `whole` alike, and results depend on no transport. There is no outer state but that and e.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from co2.equations import SparseLoCo
from co2.fragments.part import OverlappedPart
from co2.fragments.sparse_codec import SparseCodec
from overlap.core.bucket import Slot
from overlap.plan.partition import BucketSpec
from overlap.transport.communicator import Communicator, Work
from overlap.transport.operation import all_gather

__all__ = ["SparsePart"]


class SparsePart(OverlappedPart):
    """A part under the rule `sparse`."""

    def __init__(self, sparse: SparseLoCo, slots: Sequence[Slot], spec: BucketSpec, rank: int, size: int) -> None:
        super().__init__(sparse, slots, spec, rank, size)
        self._lr, self._codec = sparse.lr, SparseCodec(sparse.top_k, sparse.bits)
        self._bytes: dict[int, slice] = {}  # of each slot, where its bytes are in a rank's
        end = 0
        for index, extent in self._extents.items():
            begin, end = end, end + self._codec.nbytes(extent.stop - extent.start, self.dtype)
            self._bytes[index] = slice(begin, end)
        self._nbytes = end

    @property
    def exchanged_bytes(self) -> int:
        return self._size * self._nbytes

    def reduce(self, comm: Communicator) -> None:
        """Encode what this rank sends; nothing is reduced, since no rank owns a shard.

        Out of data, what was left out stays.
        """
        self._wire = torch.empty(self._size, self._nbytes, dtype=torch.uint8, device=self.whole.device)
        said = torch.zeros_like(self.outgoing)
        for index, extent in self._extents.items():
            own = self._codec.encode(self.outgoing[extent])
            self._wire[self._rank, self._bytes[index]] = own
            said[extent] = self._codec.decode(own, extent.stop - extent.start, self.dtype)
        if self.contributes:
            self.residual = self._left_out(self.outgoing, said, self.residual, self._extents)

    def settle(self, gap: float, idle: Collection[int]) -> None:
        """Do nothing: the outer step is made when all ranks' progress is here."""

    def gather(self, comm: Communicator) -> Work:
        """Send what was encoded to all ranks."""
        return comm.start(all_gather(self._wire[self._rank], self._wire.view(-1), label="co2 gather"))

    def received(self) -> None:
        """Make the outer step, on every rank."""
        for index, extent in self._extents.items():
            if index in self._idle:
                continue
            total = torch.zeros_like(self.whole[extent])
            for rank, wire in enumerate(self._wire[:, self._bytes[index]]):
                if rank not in self.among.out:
                    self._codec.add(wire, total)
            self.whole[extent] -= self._lr * (total / self.among.count)
        self.outgoing = self._wire = torch.empty(0, device="cpu")
