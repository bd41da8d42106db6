"""Parameters of one type that are averaged together, and this rank's share of the outer state.

`whole` is one flat buffer that serves twice: it carries what a round ended in to the owners of its shards, and brings
back from them where the next round but one starts. Between the two it holds that start, on every rank. Shards are never
written in place, so that one vector may have several names, and whoever holds one may go on reading it.

All of it is in the host's memory, where a round's thread sends it from and updates it. Parameters on a GPU are copied there
and back by the main thread, which waits for that: once a round.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from co2.equations import Averaging, Ended
from overlap.core.bucket import Slot
from overlap.plan.partition import BucketSpec, TensorSpec, fuse, pieces
from overlap.transport.broadcast import overwrite
from overlap.transport.communicator import Communicator, ReduceOp, Work
from overlap.transport.memory import view_like
from overlap.transport.operation import all_gather, reduce_scatter

__all__ = ["LASTING", "VECTORS", "Contributors", "Part", "Shares", "Vectors", "as_real", "make_parts", "outer_dtype"]

_FUSION_BYTES = 25 * 2**20  # one operation for as much; small enough that owners update while more is on the wire
# By slot: from where to where in the flattened parameter a rank's share goes, and that share of each vector that is
# `shared`; and what else belongs to these elements.
Shares = dict[int, tuple[int, int, dict[str, Any]]]
Vectors = dict[int, dict[str, torch.Tensor]]  # by slot, whole
VECTORS = ("start", "momentum", "next")
LASTING = ("momentum", "owed")  # vectors that are more than where a round began and what is on its way
_PLACES = ("start", "next")  # vectors that are where parameters are, at first; others are zero
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Contributors:
    """The ranks that an average is taken over: all of `size`, except those that are `out` of data."""

    size: int
    out: frozenset[int] = frozenset()

    @property
    def count(self) -> int:
        return self.size - len(self.out)


def outer_dtype(dtype: torch.dtype) -> torch.dtype:
    """The real type of the outer state of parameters of type `dtype`: float32, or float64 where they need it."""
    real = dtype.to_real()
    return torch.float64 if real is torch.float64 else torch.float32


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's values without its graph; complex numbers as pairs."""
    plain = tensor.detach()
    return torch.view_as_real(plain) if plain.is_complex() else plain


def make_parts(
    slots: Sequence[Slot], rank: int, size: int, make: Callable[[Sequence[Slot], BucketSpec, int, int], Part]
) -> list[Part]:
    """Parts for `slots`, in their order, the same on every rank. All parameters hold the same values on every rank."""
    specs = []
    for slot in slots:
        param = slot.param
        width = torch.empty((), dtype=outer_dtype(param.dtype), device="cpu").element_size()
        specs.append(TensorSpec(as_real(param).numel(), width, (str(param.dtype), str(param.device))))
    units = [(index,) for index in range(len(slots))]
    plans = fuse(units, specs, size, threshold_bytes=_FUSION_BYTES)
    return [make([slots[index] for index in plan.tensors], plan, rank, size) for plan in plans]


class Part:
    """Parameters that travel in one flat buffer, and this rank's share of their outer state.

    `start` is where the current round began, `next` where the next one begins (the same, if no round was averaged since),
    `before` where the round on its way to being averaged began. `rule` makes the outer step. :attr:`among` says, before a
    round or an average is sent, whose it is; all ranks send, and own their shards.
    """

    shared: tuple[str, ...] = VECTORS  # vectors of which each rank has a share
    _stays = "next"  # the one that is in the buffer between rounds

    def __init__(self, rule: Averaging, slots: Sequence[Slot], spec: BucketSpec, rank: int, size: int) -> None:
        self._rule = rule
        self._lay_out(slots, spec, rank, size)
        self.pack()
        self.start = self.next = self.before = self.whole[self.own].clone()
        self.momentum = torch.zeros_like(self.start)

    def _lay_out(self, slots: Sequence[Slot], spec: BucketSpec, rank: int, size: int) -> None:
        params = [slot.param for slot in slots]
        self._rank, self._size, self.among = rank, size, Contributors(size)
        self.slots, self.param_dtype, self.dtype = list(slots), params[0].dtype, outer_dtype(params[0].dtype)
        self.whole = torch.zeros(spec.padded_numel, dtype=self.dtype, device="cpu")
        self.own = spec.own(rank, size)
        self._offsets = spec.offsets
        self._places = self._views(self.whole)
        numels = [as_real(param).numel() for param in params]
        ends = (slice(offset, offset + numel) for offset, numel in zip(spec.offsets, numels, strict=True))
        self._extents = dict(zip((slot.index for slot in slots), ends, strict=True))  # in `whole`
        self.pieces = {slots[place].index: (extent, inside) for place, extent, inside in pieces(spec, numels, self.own)}
        self.mean = torch.empty(0, device="cpu")  # what the reduction gives, while it is needed
        # Until the first event, what all ranks begin with is known here: from what was loaded, or from the buffer.
        self._fresh = True
        self._loaded: Vectors | None = None

    def _views(self, flat: torch.Tensor) -> list[tuple[Slot, torch.Tensor]]:
        """Where each slot's values are in `flat`, which is laid out as `whole`."""
        return [
            (slot, view_like(flat, offset, as_real(slot.param)))
            for slot, offset in zip(self.slots, self._offsets, strict=True)
        ]

    @property
    def exchanged_bytes(self) -> int:
        """The number of bytes of all ranks' shards, as they travel in a round."""
        return self.whole.nbytes

    def check(self) -> None:
        """Raise ``RuntimeError`` if parameters were converted to another type: the outer state would not fit them."""
        for slot in self.slots:
            if slot.param.dtype is not self.param_dtype:
                raise RuntimeError(
                    f"parameter {slot.name!r} was {self.param_dtype} when co2 took it in and is {slot.param.dtype}: "
                    "convert the model first, and wrap its optimizer then"
                )

    def pack(self) -> None:
        """Copy the parameters into the buffer."""
        for slot, place in self._places:
            place.copy_(as_real(slot.param))

    def load_average(self) -> None:
        """Copy the parameters into the buffer, to be averaged and waited for."""
        self.pack()
        self.mean = torch.empty_like(self.start)

    @torch.no_grad()
    def unpack(self, kept: Collection[int]) -> None:
        """Copy the buffer into the parameters, except those `kept`; 16-bit ones are rounded."""
        for slot, place in self._places:
            if slot.index not in kept:
                overwrite(as_real(slot.param), place)

    @torch.no_grad()
    def turn(self, idle: Collection[int], kept: Collection[int]) -> None:
        """End a round: parameters become the next one's start, and the buffer what they were, if it is to be sent.

        Of `idle` ones, those `kept` are the script's, see :meth:`adopt`.
        """
        self._fresh, self._loaded = False, None
        travels = not self.rests(idle)
        for slot, place in self._places:
            if slot.index in kept:
                continue
            ended = as_real(slot.param).to("cpu", copy=True) if travels else place
            overwrite(as_real(slot.param), place)
            place.copy_(ended)
        self.before, self.start = self.start, self.next
        self.adopt(kept)
        self.mean = torch.empty_like(self.start)

    # - On the thread of a round, in this order: reduce, reduced, settle, gather, received; of an average, the three of the
    #   buffer

    @property
    def contributes(self) -> bool:
        """Whether what this rank sends counts."""
        return self._rank not in self.among.out

    def reduce_whole(self, comm: Communicator) -> Work:
        """Send the buffer to the owners of its shards, which average it as `mean`."""
        if not self.contributes:
            self.whole.zero_()
        op = ReduceOp.SUM if self.among.out else ReduceOp.AVG
        return comm.start(reduce_scatter(self.whole, self.mean, op, label="co2 average"))

    def reduced_whole(self) -> None:
        """Turn a sum that has arrived into the mean of the ranks that contribute."""
        if self.among.out:
            self.mean /= self.among.count

    def gather_whole(self, comm: Communicator) -> Work:
        """Send all shards of the buffer to all ranks."""
        return comm.start(all_gather(self.whole[self.own], self.whole, label="co2 gather"))

    def reduce(self, comm: Communicator) -> Work | None:
        """Send what :meth:`turn` prepared to the owners of shards, where there are any."""
        return self.reduce_whole(comm)

    def reduced(self) -> None:
        """Use what :meth:`reduce` brought."""
        self.reduced_whole()

    def gather(self, comm: Communicator) -> Work:
        """Send what :meth:`settle` left in the shards to all ranks."""
        return self.gather_whole(comm)

    def received(self) -> None:
        """Use what :meth:`gather` brought."""

    def written(self, among: Collection[int]) -> set[int]:
        """The slots `among` whose parameters differ from the buffer, which no round uses now."""
        found = set()
        for slot, place in self._places:
            real = as_real(slot.param)
            if slot.index in among and not torch.equal(real, place.to(real)):
                found.add(slot.index)
        return found

    def adopt(self, kept: Collection[int]) -> None:
        """Take over what the script wrote to the parameters `kept`, into the buffer and this rank's share."""
        written = self.written(kept)
        if not written:
            return
        for slot, place in self._places:
            if slot.index in written:
                place.copy_(as_real(slot.param))
        values, start, following = self.whole[self.own], self.start.clone(), self.next.clone()
        for index in written.intersection(self.pieces):
            _, inside = self.pieces[index]
            start[inside] = following[inside] = values[inside]
        self.start, self.next = start, following

    def rests(self, idle: Collection[int]) -> bool:
        """Whether none of its parameters was trained."""
        return all(slot.index in idle for slot in self.slots)

    def squared_steps(self, idle: Collection[int]) -> dict[int, float]:
        """The squared norm of the last outer step in this rank's share, by slot that is not `idle`, in fp64."""
        step = (self.start - self.before).double()
        return {
            index: float(step[inside].square().sum()) for index, (_, inside) in self.pieces.items() if index not in idle
        }

    def settle(self, gap: float, idle: Collection[int]) -> None:
        """Make the outer step of this rank's share from `mean`, and put it into the buffer; `idle` slots stay."""
        self.next, self.momentum = self._stepped(self.before, idle, gap, 1.0)
        self.whole[self.own] = self.next

    def advance(self, idle: Collection[int], rates: Mapping[int, float]) -> torch.Tensor:
        """This rank's share of where the next round starts, for a rule that waits for `mean`; `idle` slots stay.

        `rates`: the mean inner learning rates of the round by slot, where the rule needs them.
        """
        inner_lr: torch.Tensor | float = 1.0
        if self._rule.needs_inner_lr:
            inner_lr = torch.zeros_like(self.start)
            for index, (_, inside) in self.pieces.items():
                inner_lr[inside] = rates[index]
        following, self.momentum = self._stepped(self.start, idle, 1.0, inner_lr)
        return following

    def _stepped(
        self, began: torch.Tensor, idle: Collection[int], gap: float, inner_lr: torch.Tensor | float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ended = Ended(self._rounded(began), self.mean, self.start, self.momentum, gap, inner_lr)
        following, momentum = self._rule.step(ended)
        for index, (_, inside) in self.pieces.items():
            if index in idle:
                following[inside] = self.start[inside]
                momentum[inside] = 0
        return following, momentum

    def _rounded(self, values: torch.Tensor) -> torch.Tensor:
        """As parameters hold them, where local steps begin."""
        return values.to(self.param_dtype).to(self.dtype) if self.param_dtype in _HALF else values

    def rest(self) -> None:
        """Do what :meth:`settle` and :meth:`advance` do, for a part that is not sent."""
        self.next, self.momentum = self.start, torch.zeros_like(self.start)

    def blend(self, idle: Collection[int]) -> torch.Tensor:
        """The share of `mean`, plus the outer step that parameters have not made yet; for `idle` slots that alone."""
        blended = self.mean + (self.next - self.start)
        for index, (_, inside) in self.pieces.items():
            if index in idle:
                blended[inside] = self.next[inside]
        return blended

    def restart(self, shard: torch.Tensor) -> None:
        """Begin the next round at `shard`, which this rank's parameters hold already."""
        self._fresh, self._loaded = False, None
        self.start = self.next = self.before = shard

    # - Whole tensors, for checkpoints

    def share(self, *, passed: bool) -> Shares:
        """This rank's share of the outer state.

        `passed`: as they were before the last :meth:`turn`, whose average is not back yet.
        """
        vectors = self._vectors(passed)
        return {
            index: (*extent, {name: vector[inside].clone() for name, vector in vectors.items()})
            for index, (extent, inside) in self.pieces.items()
        }

    def _vectors(self, passed: bool) -> dict[str, torch.Tensor]:
        """This rank's shards of the vectors that are `shared`, by their names."""
        start, following = (self.before, self.start) if passed else (self.start, self.next)
        return {"start": start, "next": following, "momentum": self.momentum}

    def lasting(self) -> Shares:
        """What this rank has of the vectors in :data:`LASTING`, flat."""
        return {
            index: (low, high, {name: vector for name, vector in vectors.items() if name in LASTING})
            for index, (low, high, vectors) in self.share(passed=False).items()
        }

    def own_vectors(self) -> Vectors:
        """Whole vectors by slot for which no other rank has to be asked."""
        return {slot.index: {} for slot in self.slots}

    @property
    def moved_on(self) -> bool:
        """Whether the part went through an event, so that others hold what :meth:`complete` would give."""
        return not self._fresh

    def complete(self) -> Vectors | None:
        """Whole tensors by slot before the first event, where this rank has all of them; else None."""
        if not self._fresh:
            return None
        found = self.own_vectors()
        for slot, place in self._places:
            loaded = None if self._loaded is None else self._loaded[slot.index]
            for name in self.shared:
                at_first = place if name in _PLACES else torch.zeros_like(place)
                found[slot.index][name] = (at_first if loaded is None else loaded[name]).clone()
        return found

    @torch.no_grad()
    def load(self, vectors: Vectors) -> None:
        """The inverse of :meth:`share`, from whole tensors by slot."""
        self._loaded = {
            slot.index: {name: vectors[slot.index][name].clone() for name in self.shared} for slot in self.slots
        }
        shards = {}
        for name in (*self.shared, self._stays):
            self._fill(self._places, vectors, name)
            shards[name] = self.whole[self.own].clone()
        self._take(shards, vectors)

    def _take(self, shards: dict[str, torch.Tensor], vectors: Vectors) -> None:
        """Go on from what was loaded: this rank's `shards`, and of whole `vectors` those that are its own."""
        self.start = self.before = shards["start"]
        self.momentum, self.next = shards["momentum"], shards["next"]

    @staticmethod
    def _fill(places: Iterable[tuple[Slot, torch.Tensor]], vectors: Vectors, name: str) -> None:
        for slot, place in places:
            place.copy_(vectors[slot.index][name])
