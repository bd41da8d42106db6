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
from co2.part import Part, Vectors, as_real
from overlap.core.bucket import Slot
from overlap.plan.partition import BucketSpec
from overlap.transport.broadcast import overwrite

__all__ = ["OverlappedPart"]


class OverlappedPart(Part):
    """A part under `rule`, which averages fragments in turn."""

    shared: tuple[str, ...] = ()
    _stays = "start"

    def __init__(self, rule: Overlapped, slots: Sequence[Slot], spec: BucketSpec, rank: int, size: int) -> None:
        self._mixing, self._feedback = rule.mixing or 0.0, rule.feedback
        self._lay_out(slots, spec, rank, size)
        self._numel = self.own.stop - self.own.start  # of a shard
        self.pack()
        self.residual: torch.Tensor | None = None
        self.outgoing = self._wire = torch.empty(0, device="cpu")  # while they are needed
        self._idle: frozenset[int] = frozenset()  # in the last round

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

    def _vectors(self, passed: bool) -> dict[str, torch.Tensor]:
        """This rank's shards, which are the same before and after :meth:`turn`."""
        return {}

    def own_vectors(self) -> Vectors:
        residual = torch.zeros_like(self.whole) if self.residual is None else self.residual
        vectors: Vectors = {slot.index: {"start": place.clone()} for slot, place in self._places}
        for slot, place in self._views(residual):
            vectors[slot.index]["residual"] = place.clone()
        return vectors

    def _take(self, shards: dict[str, torch.Tensor], vectors: Vectors) -> None:
        residual = torch.zeros_like(self.whole)
        self._fill(self._views(residual), vectors, "residual")
        self.residual = residual if residual.any() else None
