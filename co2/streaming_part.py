"""Parameters of one fragment that are averaged together under "streaming-diloco" (`co2.equations`).

    whole       x, where the outer steps have come to: the same on every rank, and where every round of the fragment begins
    momentum    m: this rank's shard
    owed        r: what the bytes of this rank's shard of outer steps left out; None while that is nothing
    residual    e: whole, what the bytes of this rank's progress left out; None while that is nothing
    outgoing    d + e, from when it is sent until it is encoded

Two operations carry a round. An all-to-all brings each rank's progress to the owner of each shard, as bytes of `co2.codec`.
The owner decodes them one after the other, in the order of ranks, and sums in the outer state's own type (fp32), so that
results depend on no transport; its outer step goes back as bytes in an all-gather. Everybody moves `whole` by what the
bytes say, the owner as well. Parameters are left alone until :meth:`apply`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from co2.codec import codec_of
from co2.equations import StreamingDiLoCo, nesterov
from co2.part import Part, Shares, Vectors, as_real
from overlap.core.bucket import Slot
from overlap.plan.partition import BucketSpec
from overlap.transport.broadcast import overwrite
from overlap.transport.communicator import Communicator, Work

__all__ = ["StreamingPart"]


class StreamingPart(Part):
    """A part under `streaming`."""

    shared = ("momentum", "owed")

    def __init__(
        self, streaming: StreamingDiLoCo, slots: Sequence[Slot], spec: BucketSpec, rank: int, size: int
    ) -> None:
        self._streaming, self._codec, self._size = streaming, codec_of(streaming.bits), size
        self._lay_out(slots, spec, rank, size)
        self._extents = {
            slot.index: slice(offset, offset + as_real(slot.param).numel())
            for slot, offset in zip(slots, spec.offsets, strict=True)
        }
        self._rank = rank
        self._numel = self.own.stop - self.own.start  # of a shard
        self.pack()
        self.momentum = torch.zeros(self._numel, dtype=self.dtype, device=self.whole.device)
        self.owed: torch.Tensor | None = None
        self.residual: torch.Tensor | None = None
        self.outgoing = self._wire = torch.empty(0, device="cpu")  # while they are needed
        self._idle: frozenset[int] = frozenset()  # in the last round
        self._fresh, self._loaded = True, None

    @property
    def exchanged_bytes(self) -> int:
        return self._size * self._codec.nbytes(self._numel, self.dtype)

    # - A round, in the order in which it goes

    @torch.no_grad()
    def turn(self, idle: Collection[int], kept: Collection[int]) -> None:
        """What this rank has learned is to travel; nothing of `idle` slots, which stay as they are."""
        self._fresh, self._loaded, self._idle = False, None, frozenset(idle)
        if self.rests(idle):
            return
        self.outgoing = self._rounded(self.whole).clone()
        for slot, place in self._views(self.outgoing):
            place.sub_(as_real(slot.param))
        if self.residual is not None:
            self.outgoing += self.residual
        for index in self._extents.keys() & self._idle:
            self.outgoing[self._extents[index]] = 0

    def reduce(self, comm: Communicator) -> Work:
        """Encodes what travels, and sends it to the owners of shards."""
        rows = self.outgoing.view(self._size, self._numel)
        wire = self._codec.encode(rows)
        said = self._codec.decode(wire, self._numel, self.dtype).reshape(-1)
        self.residual = self._left_out(self.outgoing, said, self.residual, self._extents)
        self._wire = torch.empty_like(wire)
        return comm.all_to_all_async(wire.view(-1), self._wire.view(-1), label="co2 average")

    def settle(self, gap: float, idle: Collection[int]) -> None:
        """The outer step of this rank's shard, from all ranks' progress."""
        total = torch.zeros_like(self.momentum)
        for wire in self._wire.split(1):
            total += self._codec.decode(wire, self._numel, self.dtype).reshape(-1)
        rule, still = self._streaming, torch.zeros_like(total)
        step, self.momentum = nesterov(still, total / self._size, self.momentum, rule.lr, rule.momentum)
        if self.owed is not None:
            step += self.owed
        insides = {index: inside for index, (_, inside) in self.pieces.items()}
        for index in insides.keys() & self._idle:
            step[insides[index]] = self.momentum[insides[index]] = 0
        own = self._codec.encode(step.unsqueeze(0))
        said = self._codec.decode(own, self._numel, self.dtype).reshape(-1)
        self.owed = self._left_out(step, said, self.owed, insides)
        self._wire[self._rank] = own[0]

    def gather(self, comm: Communicator) -> Work:
        """Sends that step to everybody."""
        return comm.all_gather_async(self._wire[self._rank], self._wire.view(-1), label="co2 gather")

    def received(self) -> None:
        """Everybody's `whole` moves by all steps."""
        self.whole += self._codec.decode(self._wire, self._numel, self.dtype).reshape(-1)
        self.outgoing = self._wire = torch.empty(0, device="cpu")

    def rest(self) -> None:
        self.momentum = torch.zeros_like(self.momentum)

    @torch.no_grad()
    def apply(self, arriving: Collection[int]) -> None:
        """What came of a round counts for parameters: of those `arriving`."""
        mixing = self._streaming.mixing
        for slot, place in self._places:
            if slot.index in arriving:
                real = as_real(slot.param)
                overwrite(real, mixing * real.to(self.dtype) + (1 - mixing) * place)

    def _left_out(
        self, meant: torch.Tensor, said: torch.Tensor, before: torch.Tensor | None, extents: Mapping[int, slice]
    ) -> torch.Tensor | None:
        """What the bytes left out; of idle slots, of which nothing was sent, what they had left out `before`."""
        kept = set[int]() if before is None else {index for index in extents if index in self._idle}
        if not self._codec.lossy and not kept:
            return None
        left = meant - said
        for index in kept:
            assert before is not None
            left[extents[index]] = before[extents[index]]
        return left

    def advance(self, idle: Collection[int], rates: Mapping[int, float]) -> torch.Tensor:
        raise AssertionError("nobody waits under this rule")

    # - An average that is waited for: `whole` brings it, and is x again. What bytes have left out so far stays to be sent

    def load_average(self) -> None:
        self.pack()
        self.mean = torch.empty_like(self.momentum)

    def blend(self, idle: Collection[int]) -> torch.Tensor:
        return self.mean

    def restart(self, shard: torch.Tensor) -> None:
        self._fresh, self._loaded = False, None

    def adopt(self, kept: Collection[int]) -> None:
        """What the script wrote counts as this rank's progress, once the parameter is trained again."""

    # - Whole tensors, for checkpoints. With no round on its way here

    def share(self, *, passed: bool) -> Shares:
        """This rank's shards, which are the same before and after :meth:`turn`."""
        owed = torch.zeros_like(self.momentum) if self.owed is None else self.owed
        return {
            index: (*extent, {"momentum": self.momentum[inside].clone(), "owed": owed[inside].clone()})
            for index, (extent, inside) in self.pieces.items()
        }

    def own_vectors(self) -> Vectors:
        residual = torch.zeros_like(self.whole) if self.residual is None else self.residual
        vectors: Vectors = {slot.index: {"start": place.clone()} for slot, place in self._places}
        for slot, place in self._views(residual):
            vectors[slot.index]["residual"] = place.clone()
        return vectors

    def complete(self) -> Vectors | None:
        if not self._fresh:
            return None
        if self._loaded is not None:
            return {index: {name: one.clone() for name, one in each.items()} for index, each in self._loaded.items()}
        zeros = {slot.index: torch.zeros_like(place) for slot, place in self._places}
        own = self.own_vectors()
        return {index: {**own[index], "momentum": zero, "owed": zero.clone()} for index, zero in zeros.items()}

    @torch.no_grad()
    def load(self, vectors: Vectors) -> None:
        self._loaded = {
            slot.index: {name: one.clone() for name, one in vectors[slot.index].items()} for slot in self.slots
        }
        flats = {name: torch.zeros_like(self.whole) for name in ("start", "residual", "momentum", "owed")}
        for name, flat in flats.items():
            for slot, place in self._views(flat):
                place.copy_(vectors[slot.index][name])
        self.whole.copy_(flats["start"])
        self.residual = flats["residual"] if flats["residual"].any() else None
        self.momentum = flats["momentum"][self.own].clone()
        owed = flats["owed"][self.own].clone()
        self.owed = owed if owed.any() else None
