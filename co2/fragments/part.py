"""The parts of one fragment that are averaged together, in the background or waited for (`co2.fragments.rounds`).

    whole       x, where the outer steps have come to: the same on every rank, and where every round of the fragment begins
    residual    e: whole, what the bytes of this rank's progress left out; None while that is nothing
    outgoing    d + e, from when it is sent until it is encoded

How that travels and what x becomes is the rule's. Parameters are left alone until :meth:`apply`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from co2.equations import Overlapped
from co2.part import Part, Shares, Vectors, as_real
from overlap.core.bucket import Slot
from overlap.plan.partition import BucketSpec
from overlap.transport.broadcast import overwrite

__all__ = ["OverlappedPart"]


class OverlappedPart(Part):
    """A part under `rule`, which averages fragments in turn."""

    shared: tuple[str, ...] = ()

    def __init__(self, rule: Overlapped, slots: Sequence[Slot], spec: BucketSpec, rank: int, size: int) -> None:
        self._mixing, self._feedback = rule.mixing or 0.0, rule.feedback
        self._lay_out(slots, spec, rank, size)
        self._extents = {
            slot.index: slice(offset, offset + as_real(slot.param).numel())
            for slot, offset in zip(slots, spec.offsets, strict=True)
        }
        self._numel = self.own.stop - self.own.start  # of a shard
        self.pack()
        self.residual: torch.Tensor | None = None
        self.outgoing = self._wire = torch.empty(0, device="cpu")  # while they are needed
        self._idle: frozenset[int] = frozenset()  # in the last round
        self._fresh, self._loaded = True, None

    # - A round

    @torch.no_grad()
    def turn(self, idle: Collection[int], kept: Collection[int]) -> None:
        """Prepare what this rank has learned to be sent; `idle` slots send nothing and stay as they are."""
        self._fresh, self._loaded, self._idle = False, None, frozenset(idle)
        if self.rests(idle):
            return
        self.outgoing = self._rounded(self.whole).clone()
        for slot, place in self._views(self.outgoing):
            place.sub_(as_real(slot.param).cpu())
        if self.residual is not None:
            self.outgoing += (
                self._feedback * self.residual
            )  # rounded twice, as in the equations, whatever the processor
        for index in self._extents.keys() & self._idle:
            self.outgoing[self._extents[index]] = 0

    @torch.no_grad()
    def apply(self, arriving: Collection[int]) -> None:
        """Apply the outcome of a round to the parameters of the slots `arriving`."""
        for slot, place in self._places:
            if slot.index in arriving:
                real = as_real(slot.param)
                mixed = place if self._mixing == 0 else self._mixing * real.to(place) + (1 - self._mixing) * place
                overwrite(real, mixed)

    def _left_out(
        self, meant: torch.Tensor, said: torch.Tensor, before: torch.Tensor | None, extents: Mapping[int, slice]
    ) -> torch.Tensor:
        """What the bytes left out; of idle slots, of which nothing was sent, what they had left out `before`."""
        left = meant - said
        if before is not None:
            for index in extents.keys() & self._idle:
                left[extents[index]] = before[extents[index]]
        return left

    def reduced(self) -> None:
        """Do nothing: what arrives is encoded still."""

    def rest(self) -> None:
        """Do nothing: a part that is not sent has nothing to forget."""

    def advance(self, idle: Collection[int], rates: Mapping[int, float]) -> torch.Tensor:
        raise AssertionError("its rounds are no averages that are waited for")

    # - An average that is waited for: `whole` brings it, and is x again. What bytes have left out so far stays to be sent

    def load_average(self) -> None:
        self.pack()
        self.mean = torch.empty(self._numel, dtype=self.dtype, device=self.whole.device)

    def blend(self, idle: Collection[int]) -> torch.Tensor:
        return self.mean

    def restart(self, shard: torch.Tensor) -> None:
        self._fresh, self._loaded = False, None

    def adopt(self, kept: Collection[int]) -> None:
        """Do nothing: what the script wrote counts as this rank's progress once the parameter is trained again."""

    # - Whole tensors, for checkpoints. With no round on its way here

    def share(self, *, passed: bool) -> Shares:
        """This rank's shards, which are the same before and after :meth:`turn`."""
        vectors = self._shards()
        return {
            index: (*extent, {name: vector[inside].clone() for name, vector in vectors.items()})
            for index, (extent, inside) in self.pieces.items()
        }

    def _shards(self) -> dict[str, torch.Tensor]:
        """Of the vectors that are `shared`, by their names."""
        return {}

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
        own = self.own_vectors()
        for slot, place in self._places:
            own[slot.index].update((name, torch.zeros_like(place)) for name in self.shared)
        return own

    @torch.no_grad()
    def load(self, vectors: Vectors) -> None:
        self._loaded = {
            slot.index: {name: one.clone() for name, one in vectors[slot.index].items()} for slot in self.slots
        }
        flats = {name: torch.zeros_like(self.whole) for name in ("start", "residual", *self.shared)}
        for name, flat in flats.items():
            for slot, place in self._views(flat):
                place.copy_(vectors[slot.index][name])
        self.whole.copy_(flats["start"])
        self.residual = flats["residual"] if flats["residual"].any() else None
        self._load_shards({name: flats[name][self.own].clone() for name in self.shared})

    def _load_shards(self, shards: dict[str, torch.Tensor]) -> None:
        """The inverse of :meth:`_shards`."""
