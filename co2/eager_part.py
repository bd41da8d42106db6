"""The parts of "eager" (`co2.equations`), for which each rank makes an outer step of its own.

`whole` carries this rank's pseudo-gradient of a round off, and brings the mean of all ranks' back, which counts at the end
of the next one. All other vectors are whole, too, and this rank's: nobody else has them.

    start       where the current round began
    momentum    of the outer Nesterov
    progress    this rank's pseudo-gradient of the round on its way, of which its part counted at once
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from co2.equations import Eager, eager_gradient, nesterov
from co2.part import Part, Shares, Vectors, as_real
from overlap.core.bucket import Slot
from overlap.plan.partition import BucketSpec
from overlap.transport.broadcast import overwrite

__all__ = ["EagerPart"]


class EagerPart(Part):
    """A part under "eager"; this rank and its group have `weight` in the mean of all: one over the number of groups.

    Where ranks are out of data, the others weigh more. That is known a round late: a round's own part counts before.
    """

    def __init__(
        self, eager: Eager, weight: float, slots: Sequence[Slot], spec: BucketSpec, rank: int, size: int
    ) -> None:
        self._eager, self._weight, self._counted = eager, weight, weight
        self._lay_out(slots, spec, rank, size)
        self.start = self._values()
        self.momentum, self.progress = torch.zeros_like(self.start), torch.zeros_like(self.start)

    def _values(self) -> torch.Tensor:
        """Parameters as they are, laid out as `whole`."""
        flat = torch.zeros_like(self.whole)
        for slot, place in self._views(flat):
            place.copy_(as_real(slot.param))
        return flat

    # - A round

    @torch.no_grad()
    def turn(self, idle: Collection[int], kept: Collection[int]) -> None:
        """End a round: make this rank's outer step, from the mean of the round before, which is in the buffer.

        Its progress is to travel.

        An `idle` slot made no progress. It takes over what was on its way, unless it is `kept`: then it is the script's.
        """
        ended = self._values()
        progress = self._rounded(self.start) - ended
        for index in self._extents.keys() & idle:
            progress[self._extents[index]] = 0
        weight = self._weight if not self.among.out else self._weight * (self._size / self.among.count)
        gradient = eager_gradient(progress, self.progress, self.whole, weight, self._counted)
        following, momentum = nesterov(self.start, gradient, self.momentum, self._eager.lr, self._eager.momentum)
        for index in self._extents.keys() & idle:
            momentum[self._extents[index]] = 0
        for index in self._extents.keys() & kept:
            following[self._extents[index]] = ended[self._extents[index]]
        for slot, place in self._views(following):
            if slot.index not in kept:
                overwrite(as_real(slot.param), place)
        self.start, self.momentum, self.progress, self._counted = following, momentum, progress, weight
        self.whole.copy_(progress)
        self.mean = torch.empty_like(self.whole[self.own])

    def settle(self, gap: float, idle: Collection[int]) -> None:
        self.whole[self.own] = self.mean

    def rest(self) -> None:
        self.whole.zero_()

    # - An average that is waited for

    @torch.no_grad()
    def load_average(self) -> None:
        """Put the parameters into the buffer, after the outer step of the others' part of the last round."""
        pending = self._pending()
        self.momentum = self.momentum + pending
        self.pack()
        self.whole -= self._eager.lr * (1 + self._eager.momentum) * pending
        self.mean = torch.empty_like(self.whole[self.own])

    def blend(self, idle: Collection[int]) -> torch.Tensor:
        return self.mean

    def restart(self, shard: torch.Tensor) -> None:
        """Begin the next round at the average in the buffer, which this rank's parameters hold already."""
        self.start = self.whole.clone()
        self.progress = torch.zeros_like(self.start)
        self.whole.zero_()

    def adopt(self, kept: Collection[int]) -> None:
        """Do nothing: what the script wrote is taken over at the end of the round."""

    # - Whole tensors, for checkpoints: each rank's own. `pending` is what arrives late: it counts whoever takes it over

    def share(self, *, passed: bool) -> Shares:
        return {}

    def lasting(self) -> Shares:
        return {
            index: (0, extent.stop - extent.start, {"momentum": self.momentum[extent].clone()})
            for index, extent in self._extents.items()
        }

    @property
    def moved_on(self) -> bool:
        return False

    @torch.no_grad()
    def complete(self) -> Vectors:
        """Whole tensors by slot, where no round is in flight."""
        flats = {"start": self.start, "momentum": self.momentum, "pending": self._pending()}
        found: Vectors = {slot.index: {} for slot in self.slots}
        for name, flat in flats.items():
            for slot, place in self._views(flat):
                found[slot.index][name] = place.clone()
        return found

    @torch.no_grad()
    def load(self, vectors: Vectors) -> None:
        self.progress = torch.zeros_like(self.start)
        for name, flat in (("start", self.start), ("momentum", self.momentum), ("pending", self.whole)):
            self._fill(self._views(flat), vectors, name)

    def _pending(self) -> torch.Tensor:
        """The others' part of the last round."""
        return self.whole - self._counted * self.progress
