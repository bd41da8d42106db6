"""The parts of "acco" (`co2.acco.rounds`): gradients of one type that are averaged together, and this rank's shard.

whole       carries the gradients of a round off, and brings back what parameters become at the end of the next one
gathered    the other buffer: gradients of the current round add up in it. At the end of a round the two change places
start       x, this rank's shard of the exact parameters
mean        the sum over ranks of the gradients of the round on its way; divided by their number when it is used
first       that of the first half, until the second half is there
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from co2.acco.update import OwnedPiece, ShardSteps
from co2.part import Part, Shares, Vectors
from overlap.core.bucket import Slot
from overlap.plan.partition import BucketSpec
from overlap.transport.communicator import Communicator, ReduceOp, Work
from overlap.transport.memory import copy_gradient, values_of
from overlap.transport.operation import all_reduce, reduce_scatter

__all__ = ["AccoPart"]


class AccoPart(Part):
    """A part whose shard on this rank is updated by `steps`.

    :attr:`second` says, before a round is sent, which half of a batch it is.
    """

    shared = ("start", "first")

    def __init__(self, steps: ShardSteps, slots: Sequence[Slot], spec: BucketSpec, rank: int, size: int) -> None:
        self._lay_out(slots, spec, rank, size)
        self._steps = steps
        self.pack()
        self.start = self.next = self.whole[self.own].clone()
        self.first = torch.zeros_like(self.start)
        self._first_counts: dict[int, float] = {}  # gradients in `first`, by slot
        self._first_used: set[int] = set()  # slots that some rank had a gradient for, of those
        self.gathered = torch.empty_like(self.whole)
        self._gathered_places = self._views(self.gathered)
        self.second = False
        self._empty()
        # Summed over ranks with a round: its gradients, and of each slot, how many ranks had one.
        self._counted = torch.zeros(1 + len(slots), dtype=torch.float64, device="cpu")
        # Until the first event the whole state is known here.
        self.whole_states: dict[int, dict[str, Any]] = {slot.index: steps.whole_state(slot) for slot in slots}
        self.owned: dict[int, OwnedPiece] = {
            slot.index: steps.piece(slot, *self.pieces[slot.index][0], self.whole_states[slot.index])
            for slot in slots
            if slot.index in self.pieces
        }

    def _empty(self) -> None:
        self.gathered.zero_()
        self.count = 0  # gradients in it, of this rank
        self._used: set[int] = set()

    # - A round

    def accumulate(self) -> None:
        """Add the gradients in ``.grad`` to those of the round."""
        self.count += 1
        for slot, place in self._gathered_places:
            gradient = slot.param.grad
            if gradient is None or not slot.param.requires_grad:  # the script may leave there what was used before
                continue
            dense = (values_of(gradient.to_dense()) if gradient.is_sparse else gradient).cpu()
            if slot.index in self._used:
                place.add_(dense)
            else:
                copy_gradient(place, dense)
                self._used.add(slot.index)

    def _exchange(self) -> None:
        """What was gathered is to travel; the buffer that brought parameters is empty."""
        self.whole, self.gathered = self.gathered, self.whole
        self._places, self._gathered_places = self._gathered_places, self._places
        self._counted[0] = self.count
        self._counted[1:] = torch.tensor([slot.index in self._used for slot in self.slots])
        self.mean = torch.empty_like(self.start)
        self._empty()

    @torch.no_grad()
    def turn(self, idle: Collection[int], kept: Collection[int]) -> None:
        self._fresh, self._loaded, self.whole_states = False, None, {}
        self.adopt(kept)
        self.unpack(kept)
        if self.rests(idle):
            self._empty()
        else:
            self._exchange()

    def reduce_whole(self, comm: Communicator) -> Work:
        counting = comm.start(all_reduce(self._counted, self._counted, label="co2 gradients"))
        work = comm.start(reduce_scatter(self.whole, self.mean, ReduceOp.SUM, label="co2 gradients"))
        counting.wait()
        return work

    def reduced_whole(self) -> None:
        """Leave the sum as it is: ranks count their gradients, and the sum is divided by that count later."""

    def settle(self, gap: float, idle: Collection[int]) -> None:
        if self.second:
            self.start = self.next = self._updated(idle)
            self._forget_first()
        else:
            self.next = self._updated(idle, forget=True)
            self.first = self.mean
            self._first_counts = {slot.index: float(self._counted[0]) for slot in self.slots if slot.index not in idle}
            self._first_used = self._used_by_any
        self.whole[self.own] = self.next

    def _updated(self, idle: Collection[int], *, forget: bool = False) -> torch.Tensor:
        """x after a step by the mean of all gradients that are here; with `forget`, of those of this round."""
        values = self.start.clone()
        summed = self.mean if forget else self.mean + self.first
        used = self._used_by_any | (set() if forget else self._first_used)
        steps: dict[OwnedPiece, tuple[torch.Tensor, torch.Tensor]] = {}
        for index, owned in self.owned.items():
            one = self.pieces[index][1]
            count = float(self._counted[0]) + (0.0 if forget else self._first_counts.get(index, 0.0))
            if index in used and count > 0 and index not in idle:
                steps[owned] = values[one], summed[one] / count
        self._steps(steps, forget=forget)
        return values

    def _forget_first(self) -> None:
        self.first = torch.zeros_like(self.start)
        self._first_counts, self._first_used = {}, set()

    @property
    def _used_by_any(self) -> set[int]:
        """Slots that some rank had a gradient for in the round on its way, once that was counted."""
        return {slot.index for slot, ranks in zip(self.slots, self._counted[1:].tolist(), strict=True) if ranks}

    def rest(self) -> None:
        """Skip a round: a first half that was sent is dropped, with the parameters frozen since."""
        self.next = self.start
        self._forget_first()

    # - An average: the update that is not made yet is made, and waited for

    def load_average(self) -> None:
        self._exchange()

    def blend(self, idle: Collection[int]) -> torch.Tensor:
        return self._updated(idle)

    def restart(self, shard: torch.Tensor) -> None:
        """Continue from `shard`; the buffer has all ranks' shards, and the parameters hold them."""
        self._fresh, self._loaded, self.whole_states = False, None, {}
        self.start = self.next = shard
        self._forget_first()

    # - Whole tensors, for checkpoints

    def share(self, *, passed: bool) -> Shares:
        """This rank's vectors, the same before and after :meth:`turn`, with the optimizer's ``state``."""
        shares = super().share(passed=passed)
        for index, (_, _, vectors) in shares.items():
            vectors["state"] = self.owned[index].copied_state()
        return shares

    def _vectors(self, passed: bool) -> dict[str, torch.Tensor]:
        return {"start": self.start, "first": self.first}

    def own_vectors(self) -> Vectors:
        """Vectors that only this rank has, with the numbers of gradients in `gathered` and `first` as 0-d tensors."""
        vectors: Vectors = {slot.index: {"next": place.clone()} for slot, place in self._places}
        for slot, place in self._gathered_places:
            counts = {
                "first_count": self._first_counts.get(slot.index, 0.0),
                "first_used": float(slot.index in self._first_used),
                "count": float(self.count),
                "used": float(slot.index in self._used),
            }
            vectors[slot.index] |= {name: torch.tensor(count, device="cpu") for name, count in counts.items()}
            vectors[slot.index]["gathered"] = place.clone()
        return vectors

    def _take(self, shards: dict[str, torch.Tensor], vectors: Vectors) -> None:
        self.start, self.first, self.next = shards["start"], shards["first"], shards["next"]
        for slot, place in self._gathered_places:
            one = vectors[slot.index]
            place.copy_(one["gathered"])
            self.count, self._first_counts[slot.index] = int(one["count"]), float(one["first_count"])
            if one["used"]:
                self._used.add(slot.index)
            if one["first_used"]:
                self._first_used.add(slot.index)
