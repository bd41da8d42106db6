"""A part under "streaming-diloco" (`co2.equations`).

    momentum    m: this rank's shard
    owed        r: what the bytes of this rank's shard of outer steps left out; None while that is nothing

Two operations carry a round. An all-to-all brings each rank's progress to the owner of each shard, as bytes of
`co2.fragments.codec`. The owner decodes them one after the other, in the order of ranks, and sums in the outer state's own
type (fp32), so that results depend on no transport; its outer step goes back as bytes in an all-gather. Everybody moves
`whole` by what the bytes say, the owner as well.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from co2.equations import StreamingDiLoCo, nesterov
from co2.fragments.codec import codec_of
from co2.fragments.part import OverlappedPart
from co2.part import Vectors
from overlap.core.bucket import Slot
from overlap.plan.partition import BucketSpec
from overlap.transport.communicator import Communicator, Work
from overlap.transport.operation import all_gather, all_to_all

__all__ = ["StreamingPart"]


class StreamingPart(OverlappedPart):
    """A part under the rule `streaming`."""

    shared = ("momentum", "owed")

    def __init__(
        self, streaming: StreamingDiLoCo, slots: Sequence[Slot], spec: BucketSpec, rank: int, size: int
    ) -> None:
        super().__init__(streaming, slots, spec, rank, size)
        self._streaming, self._codec = streaming, codec_of(streaming.bits)
        self.momentum = torch.zeros(self._numel, dtype=self.dtype, device=self.whole.device)
        self.owed: torch.Tensor | None = None

    @property
    def exchanged_bytes(self) -> int:
        return self._size * self._codec.nbytes(self._numel, self.dtype)

    def reduce(self, comm: Communicator) -> Work:
        """Encode what this rank sends, and send it to the owners of shards. Out of data, what was left out stays."""
        rows = self.outgoing.view(self._size, self._numel)
        wire = self._codec.encode(rows)
        said = self._codec.decode(wire, self._numel, self.dtype).reshape(-1)
        if self.contributes and (self._codec.lossy or self.residual is not None):
            self.residual = self._left_out(self.outgoing, said, self.residual, self._extents)
        self._wire = torch.empty_like(wire)
        return comm.start(all_to_all(wire.view(-1), self._wire.view(-1), label="co2 average"))

    def settle(self, gap: float, idle: Collection[int]) -> None:
        """Make the outer step of this rank's shard, from the mean of all progress."""
        total = torch.zeros_like(self.momentum)
        for rank, wire in enumerate(self._wire.split(1)):
            if rank in self.among.out:
                continue
            total += self._codec.decode(wire, self._numel, self.dtype).reshape(-1)
        rule, still = self._streaming, torch.zeros_like(total)
        step, self.momentum = nesterov(still, total / self.among.count, self.momentum, rule.lr, rule.momentum)
        if self.owed is not None:
            step += self.owed
        insides = {index: inside for index, (_, inside) in self.pieces.items()}
        for index in insides.keys() & self._idle:
            step[insides[index]] = self.momentum[insides[index]] = 0
        own = self._codec.encode(step.unsqueeze(0))
        said = self._codec.decode(own, self._numel, self.dtype).reshape(-1)
        if self._codec.lossy or self.owed is not None:
            self.owed = self._left_out(step, said, self.owed, insides)
        self._wire[self._rank] = own[0]

    def gather(self, comm: Communicator) -> Work:
        """Send that outer step to all ranks."""
        return comm.start(all_gather(self._wire[self._rank], self._wire.view(-1), label="co2 gather"))

    def received(self) -> None:
        """Move every rank's `whole` by all outer steps."""
        self.whole += self._codec.decode(self._wire, self._numel, self.dtype).reshape(-1)
        self.outgoing = self._wire = torch.empty(0, device="cpu")

    def rest(self) -> None:
        self.momentum = torch.zeros_like(self.momentum)

    def _vectors(self, passed: bool) -> dict[str, torch.Tensor]:
        owed = torch.zeros_like(self.momentum) if self.owed is None else self.owed
        return {"momentum": self.momentum, "owed": owed}

    def _take(self, shards: dict[str, torch.Tensor], vectors: Vectors) -> None:
        super()._take(shards, vectors)
        self.momentum = shards["momentum"]
        self.owed = shards["owed"] if shards["owed"].any() else None
