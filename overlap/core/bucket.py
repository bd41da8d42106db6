"""A bucket: gradients (and, where updates are sharded, parameters) that travel together in one flat buffer."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

import torch

from overlap.core.buckets.flat_buffer import FlatBuffer
from overlap.core.gates.holders import Strangers
from overlap.core.handles import Watch
from overlap.core.master_weights import MakeMaster, MasterWeights
from overlap.plan.plan import BucketPlan
from overlap.plan.strategy import Collectives
from overlap.transport.communicator import Communicator, ReduceOp, Start, Work
from overlap.transport.cuda.streams import Streams
from overlap.transport.memory import copy_gradient
from overlap.transport.operation import Wide
from overlap.transport.work import arrive

__all__ = ["Bucket", "Freed", "Known", "Phase", "Slot", "TooManyGradients", "changed", "clear", "line", "too_many"]

log = logging.getLogger("dear")


class Phase(Enum):
    """Where a bucket stands in its iteration.

    FILLING ─▶ REDUCING ─┬─▶ REDUCED ─┬─▶ GATHERING ─┐
       ▲                 │            │              │
       │                 └─▶ DUE ─────┤              │
       └──────────────────────────────┴──────────────┘
    """

    FILLING = auto()  # backward writes gradients into the buffer; nothing is in flight
    REDUCING = auto()  # entered when its reduction is issued; nobody may write the gradient buffer
    REDUCED = auto()  # entered when the reduction was awaited; the reduced values may be scaled, clipped, consumed
    DUE = auto()  # entered when step() left the update to whoever needs it first; nobody may read the parameters
    GATHERING = auto()  # entered when the all-gather of updated parameters is issued; nobody may read the parameters

    __hash__ = object.__hash__  # Enum's own is Python code; buckets look up their next phase in backward


_NEXT = {
    Phase.FILLING: {Phase.REDUCING},
    Phase.REDUCING: {Phase.REDUCED, Phase.DUE},
    Phase.DUE: {Phase.FILLING},
    Phase.REDUCED: {Phase.GATHERING, Phase.FILLING},  # FILLING: consumed at once, or the step was skipped
    Phase.GATHERING: {Phase.FILLING},
}


class TooManyGradients(RuntimeError):
    """More backward passes than announced ran before ``step()``."""


class Freed(NamedTuple):
    """The tensors that stand for a parameter of a freed bucket, of its shape.

    `away`, `gone`, `sent` and `zero` have one element.
    """

    whole: torch.Tensor  # while it is gathered, exact
    used: torch.Tensor  # the same for passes; it may be of 16 bits
    away: torch.Tensor  # NaN: while it is not gathered
    gone: torch.Tensor  # the same, of the type of `used`: between two uses in a round
    sent: torch.Tensor  # NaN: its gradient, which has gone into the bucket; until ``zero_grad()``, also after the step
    zero: torch.Tensor  # its gradient, after ``zero_grad(set_to_none=False)``

    @property
    def places(self) -> tuple[int, ...]:
        """Addresses at which the parameter may be."""
        return tuple(each.data_ptr() for each in (self.whole, self.used, self.away, self.gone))


@dataclass(slots=True, eq=False)
class Slot:
    """A parameter with its place in a bucket and the state of its gradient.

    ``fires`` counts gradient accumulations since the last step.
    """

    index: int
    name: str
    param: torch.nn.Parameter
    group: int  # index of its parameter group
    bucket: Bucket | None = None
    place: torch.Tensor | None = None  # in the bucket's gradient buffer
    view: torch.Tensor | None = None  # the same memory, as the user gets it: `.grad`
    expected: int = 1  # accumulations in one backward pass, learned in the first iteration
    fires: int = 0
    filled: bool = False
    noted: bool = False  # a gradient arrived that is in no bucket yet
    unused: bool = False  # all reductions of this round are issued, and no rank had a gradient for it
    claimed: bool = False  # a feature reduces its gradients, so it is in no bucket; `filled` means averaged
    freed: Freed | None = None  # where its bucket is
    held: bool = True  # some module has it, which can be seen when it is used
    filling: Callable[[torch.Tensor], None] | None = None  # writes the parameter's values, which are nowhere yet
    aside: torch.Tensor | None = None  # which of those was its gradient, before backward came to it
    _spent: weakref.ref[torch.Tensor] | None = field(
        default=None, repr=False
    )  # a `.grad` that was used, and is no view
    _given: torch.Tensor | None = field(default=None, repr=False)  # `.grad` when the slot was filled or noted …
    _version: int = 0  # … and its version then

    def move_in(self, bucket: Bucket, place: torch.Tensor) -> None:
        """Send gradients to `place` in `bucket` from now on.

        A ``.grad`` that shows the place before, and was used already, shows the new one: the old memory can go. Not
        where the parameter has become another type.
        """
        gradient, view = self.param.grad, place.data
        if gradient is not None and gradient is self.view:
            if gradient.dtype is view.dtype and gradient.device == view.device and gradient.shape == view.shape:
                with torch.no_grad():
                    view.copy_(gradient)
                self.param.grad = view
            else:
                self._spent = weakref.ref(gradient)
        self.bucket, self.place, self.view = bucket, place, view

    def make_values(self, home: torch.Tensor | None = None) -> None:
        """Give the parameter its values, where it has none yet: at `home`, or in memory of its own. On every rank."""
        if self.filling is not None:
            home = self.param.new_empty(self.param.shape) if home is None else home
            self.filling(home)
            self.param.data, self.filling = home, None

    def fill(self) -> None:
        """Move the gradient into the bucket, where ``.grad`` becomes a view; without one, zeros are summed."""
        place, view, param = self.place, self.view, self.param
        assert place is not None
        assert view is not None
        if self.freed is not None:
            self.put_aside()
        gradient, lone = param.grad, self.bucket is not None and self.bucket.lone
        if self.freed is not None:
            assert self.bucket is not None
            self.bucket.gradients.restore()
        elif not lone and (view.data_ptr() != place.data_ptr() or view.dtype is not place.dtype):
            self.view = view = place.data  # ``model.half().double()`` has given the old one other memory
        other = param.dtype is not place.dtype or param.device != place.device
        if gradient is None or (other and self.converted):
            if not lone:
                place.zero_()
            self._given = None
            if self.freed is not None and self.aside is not None:
                param.grad = self._given = self.freed.sent
                self._version = self._given._version
        else:
            if gradient.layout is not torch.strided:
                raise _not_dense(self)
            if lone:
                self.view = view = gradient.detach() if gradient.requires_grad else gradient
            else:
                copy_gradient(place, gradient)
            if self.freed is not None:
                param.grad = gradient = self.freed.sent
            elif not gradient.requires_grad:  # backward(create_graph=True): the graph hangs on the user's own tensor
                param.grad = gradient = view
            self._given, self._version = gradient, gradient._version
        self.filled = True

    def put_aside(self) -> bool:
        """Take away what stands for an earlier gradient of a freed bucket, as backward cannot add to it.

        Returns whether there was one.
        """
        gradient, freed = self.param.grad, self.freed
        if gradient is None or freed is None or self.filled:
            return False
        if gradient is freed.sent:
            element = gradient.as_strided((1,), (1,))
            if bool(element == 0):  # ``model.zero_grad(set_to_none=False)``
                element.fill_(math.nan)
                gradient = freed.zero
            else:
                assert self.bucket is not None
                self.bucket.keep_averages()
        elif gradient is not freed.zero:
            return False
        self.aside, self.param.grad = gradient, None
        return True

    def put_back(self) -> None:
        """Undo :meth:`put_aside` where backward has added nothing."""
        if self.param.grad is None and not self.filled:
            self.param.grad, self.aside = self.aside, None

    def leave_out(self) -> None:
        """Take part with zeros, and keep the gradient for another round, or for other buckets."""
        assert self.place is not None
        assert self.bucket is not None
        self.take_out()
        if self.freed is not None:
            self.bucket.gradients.restore()
        self.place.zero_()
        self._given, self.filled = None, True

    def take_out(self) -> None:
        """Give the gradient memory of its own, where it shows the bucket."""
        gradient = self.param.grad
        if gradient is None or self.view is None:
            return
        if gradient is self.view or (self.freed is not None and gradient is self.freed.sent and self.filled):
            self.param.grad = self.view.clone()

    @property
    def like(self) -> torch.Tensor:
        """A tensor shaped and laid out as the parameter, also where that is away. Its values may not be there."""
        return self.param if self.freed is None else self.freed.whole

    @property
    def rests_on(self) -> torch.device:
        """Where its whole values, and state of their size, are put for a script: the host, if shards are there."""
        return self.like.device if self.freed is None or self.bucket is None else self.bucket.shard.device

    @property
    def converted(self) -> bool:
        """Whether the parameter has become another type, or moved to another device, since it is in its bucket."""
        place, param = self.place, self.param
        if place is None or (param.dtype is place.dtype and param.device == place.device):
            return False
        return self.freed is None or param.dtype is not self.freed.used.dtype

    def keep_layout(self) -> None:
        """Lay the parameter out as its place was, if a conversion changed that: shards of the state are in this order."""
        place, param = self.place, self.param
        assert place is not None
        if self.relaid and param.shape == place.shape:
            param.data = torch.empty_strided(place.shape, place.stride(), dtype=param.dtype, device=param.device).copy_(
                param.detach()
            )

    @property
    def relaid(self) -> bool:
        """Whether the parameter's elements lie in another order than in its bucket (``.to(memory_format=…)``)."""
        assert self.place is not None
        strides = zip(self.param.shape, self.param.stride(), self.place.stride(), strict=True)
        return any(size > 1 and mine != theirs for size, mine, theirs in strides)

    def note(self) -> None:
        """Remember the gradient that backward left, of a slot whose gradient is not in a bucket yet, or never will be."""
        self._given, self.noted = self.param.grad, True
        self._version = 0 if self._given is None else self._given._version

    @property
    def replaced(self) -> bool:
        """Whether the gradient is another one than :meth:`note` saw, or was written to."""
        return self.param.grad is not self._given or (self._given is not None and self._given._version != self._version)

    @property
    def absent(self) -> bool:
        """Whether the slot is filled, and this rank has no gradient for it."""
        return self.filled and self._given is None

    @property
    def dropped(self) -> bool:
        """Whether the slot was filled, and then the gradient was removed (``model.zero_grad()``) or replaced."""
        return self.filled and self.param.grad is not self._given

    @property
    def given_by_hand(self) -> bool:
        """Whether ``.grad`` is one that no step has used and no hook has seen: ``p.grad = torch.autograd.grad(…)``."""
        gradient = self.param.grad
        if gradient is None or gradient is self.view:
            return False
        return self._spent is None or self._spent() is not gradient


def changed(slots: Iterable[Slot]) -> Iterator[Slot]:
    """The `slots` whose gradient was replaced or written to after it was filled, or after it was noted.

    Who drops a gradient that is this rank's own still (``model.zero_grad()``) keeps nothing from anybody.
    """
    for slot in slots:  # in every step: without a call for each
        given, gradient = slot._given, slot.param.grad
        if gradient is given and (given is None or given._version == slot._version):
            continue
        if slot.filled or (
            slot.noted
            and gradient is not None
            and (gradient.layout is not torch.strided or bool(gradient.detach().any()))
        ):
            yield slot


def clear(slots: Iterable[Slot]) -> None:
    """Reset `slots` after their round."""
    for slot in slots:  # in every step: without a call for each
        gradient = slot.param.grad
        slot._spent = None if gradient is None or gradient is slot.view else weakref.ref(gradient)
        slot.filled, slot.noted, slot.fires, slot.unused, slot._given, slot.aside = False, False, 0, False, None, None


class Known(NamedTuple):
    """An operation that was issued before, kept to be issued again while its tensors lie where they lay."""

    comm: Communicator
    send: torch.Tensor
    recv: torch.Tensor
    op: ReduceOp | None
    wide: Wide | None
    places: tuple[object, ...]  # addresses: ``model.share_memory()``, or a queue, moves memory under the same tensors
    start: Start
    watch: Watch | None = None  # who else uses the parameters' memory


class Bucket:
    """Slots whose gradients lie in one flat buffer, and whose parameters do where its `plan` shards them.

    ``gradients.whole`` has what backward computed, ``gradients.shard`` what a reduction leaves to this rank: its share, or
    the same memory where all is replicated. ``parameters.shard`` is what this rank updates. `collectives` issue its
    operations on the communicators of its `lane`; gradients are reduced with `op`. With `make_master`, parameters travel
    rounded, and :attr:`master` has the exact values of this rank's shard.

    One that is `lone` is reduced with nobody: gradients stay where backward left them, and the buffer is not used.
    `allocate` makes memory for whole parameters, of so many elements of a type; None: as any other tensor's.
    Where the bucket is `carried`, who moves it also rounds what is sent and widens what arrives, as
    :attr:`wide_gradients` and :attr:`wide_parameters` say. With `offload`, the streams of a device, shards of a bucket that
    is freed lie in the host's memory.
    """

    def __init__(
        self,
        index: int,
        plan: BucketPlan,
        slots: list[Slot],
        *,
        rank: int,
        world_size: int,
        collectives: Collectives,
        op: ReduceOp = ReduceOp.AVG,
        make_master: MakeMaster | None = None,
        carried: bool = False,
        lone: bool = False,
        lane: int = 0,
        allocate: Callable[[int, torch.dtype], torch.Tensor] | None = None,
        offload: Streams | None = None,
    ) -> None:
        spec = plan.spec
        self.index, self.plan, self.spec, self.slots = index, plan, spec, slots
        self.sharded, self.freed, self.owner = plan.sharded, plan.freed, plan.owner
        self.frees_gradients = plan.frees_gradients
        self.collectives, self.lane = collectives, lane
        self.lone = lone and not plan.sharded
        self._rank, self._warned = rank, False
        self.phase = Phase.FILLING
        self.work: Work | None = None
        self.reduction: Known | None = None  # see `overlap.core.wire`
        self.gathering: Known | None = None
        self.round = 0  # of its last reduction; see `overlap.core.participants`
        first = slots[0].param
        self.shares = spec.shares(world_size)  # elements of each rank's shard
        self.counts = None if len(set(self.shares)) == 1 else self.shares
        # Whether nobody's part of the reduction is done before every rank has issued it.
        self.meets = all(self.shares) if plan.sharded else bool(spec.padded_numel)
        self.own = spec.own(rank, world_size)
        everything = slice(0, spec.padded_numel)
        share = self.own if plan.sharded else everything
        self.coming = everything  # the parameters that an all-gather brings, and this rank's own
        self._offload = offload if plan.freed else None
        self.offloads = self._offload is not None
        kind, freed, offloaded = (first.dtype, first.device), plan.freed, self.offloads
        self.gradients = FlatBuffer(
            spec, share, *kind, apart=plan.sharded, freed=plan.frees_gradients, zeros=True, offloaded=offloaded
        )
        for place, slot in enumerate(slots):
            slot.move_in(self, self.gradients.view(place, slot.param))
        self.master: MasterWeights | None = None
        if plan.sharded:
            memory = None if allocate is None else allocate(spec.padded_numel, first.dtype)
            self.parameters = FlatBuffer(
                spec, share, *kind, apart=freed, freed=freed, memory=memory, offloaded=offloaded
            )
            self.adopt()
            if make_master is not None:
                self.master = make_master(self.parameters, plan.freed)
            # What an all-gather of the parameters fills in place, this rank's shard being there.
            self.travelling = self.parameters.whole if self.master is None else self.master.wire
        # What is reduced: `outgoing` of all ranks into `incoming` with `op`.
        self.outgoing, self.incoming, self.op = self.gradients.whole, self.gradients.shard, op
        self.carried = carried and plan.sharded and first.dtype is torch.float32 and first.device.type == "cpu"
        self.wide_gradients: Wide | None = None  # as the last reduction was loaded
        self.wide_parameters: Wide | None = None
        self._wide: Wide | None = None
        if self.carried and self.master is not None and not self.master.used:
            self.wide_parameters = self._wide = Wide(self.master.values, self.parameters.whole)

    def __repr__(self) -> str:
        return f"Bucket {self.index} ({len(self.slots)} tensors, {self.nbytes / 2**20:.2f} MB, {self.phase.name})"

    @property
    def label(self) -> str:
        return f"b{self.index}"

    @property
    def nbytes(self) -> int:
        return self.gradients.whole.nbytes

    @property
    def shard(self) -> torch.Tensor:
        """This rank's part of the parameters, exact: what an update writes to."""
        return self.parameters.shard if self.master is None else self.master.values

    def advance(self, to: Phase) -> None:
        if to not in _NEXT[self.phase]:
            raise RuntimeError(f"{self!r}: {self.phase.name} -> {to.name} is not a legal step")
        self.phase = to

    def adopt(self, strangers: Strangers | None = None) -> list[Slot]:
        """Make the parameters views of the flat buffer again, values kept; returns those that had left it.

        ``p.data = …``, ``vector_to_parameters`` and ``load_state_dict(assign=True)`` take a parameter out of its bucket.
        Another model's parameter may have its place since (``p.data, q.data = q.data, p.data``): `strangers` get memory of
        their own. None: nobody can be there yet.
        """
        left: list[Slot] = []
        whole = self.parameters.whole
        element_size, base = whole.element_size(), whole.data_ptr()
        for slot, offset in zip(self.slots, self.spec.offsets, strict=True):
            param = slot.param
            if param.numel() == 0 or param.data_ptr() == base + offset * element_size:
                continue
            assert slot.place is not None
            if param.dtype != whole.dtype or param.device != whole.device:
                raise RuntimeError(
                    f"parameter {slot.name!r} was {whole.dtype} on {whole.device} when the optimizer was wrapped and is "
                    f"{param.dtype} on {param.device} now; convert the model before wrapping"
                )
            if param.shape != slot.place.shape:
                raise RuntimeError(
                    f"parameter {slot.name!r} had shape {tuple(slot.place.shape)} when the optimizer was wrapped and has "
                    f"{tuple(param.shape)} now; change shapes before the optimizer is wrapped"
                )
            if slot.relaid:
                self._warn_of_layout(slot)
            for stranger in () if strangers is None else strangers.at(base + offset * element_size):
                stranger.data = stranger.data.clone()
            home = whole.data.as_strided(slot.place.shape, slot.place.stride(), offset)
            if slot.filling is not None:
                slot.make_values(home)
            else:
                self._take(slot, home, offset)
                param.data = home
            left.append(slot)
        return left

    def _take(self, slot: Slot, home: torch.Tensor, offset: int) -> None:
        """Copy the parameter's values to its place at `home`, `offset` elements from the start."""
        home.copy_(slot.param.detach())

    def settle(self) -> None:
        """Await the reduction, if it is on its way."""
        if self.work is not None:
            arrive(self.work)
            self.work = None
            if self.offloads:
                self.fetch_share()
            if self.frees_gradients:
                self.free_gradients()

    def sends(self, dtype: torch.dtype) -> torch.Tensor:
        """Memory for gradients that travel as `dtype`, until they are reduced."""
        return torch.empty_like(self.gradients.whole, dtype=dtype)

    def receives(self, dtype: torch.dtype) -> torch.Tensor:
        """Memory for this rank's share of gradients that travel as `dtype`, until :meth:`received`."""
        return self.gradients.shard.to(dtype)

    @property
    def arrived(self) -> torch.Tensor:
        """This rank's share of the gradients as it has come: ``gradients.shard``, or of the type that travels."""
        return self.incoming

    def received(self) -> None:
        """The averages are in ``gradients.shard``."""

    # - What is more than nothing in a bucket whose gradients are freed: `overlap.core.buckets.freed`

    def hold_gradients(self) -> None:
        """Gradients are about to be reduced."""

    def fetch_share(self) -> None:
        """Gradients are reduced: this rank's share, which is offloaded, goes to where it rests. The host goes on."""

    def free_gradients(self) -> None:
        """Gradients are in shards: their memory is free."""

    def await_copies(self) -> None:
        """Wait, on the host, for copies between a device and shards in the host's memory."""

    def stand_in(self) -> None:
        """Let what stands for a gradient in shards be ``.grad`` on every rank, as the average is everybody's."""

    def keep_averages(self) -> None:
        """Keep those of the last round, to which this round's are added."""

    def add_kept(self) -> None:
        """Add those that :meth:`keep_averages` has kept to this round's, where they were not zeroed."""

    def _warn_of_layout(self, slot: Slot) -> None:
        assert slot.place is not None
        if self._rank == 0 and not self._warned:
            log.warning(
                "parameter %r (and maybe others) has strides %s, and had %s when the optimizer was wrapped; its shards are "
                "in that order, so step() puts it back, with its values. Results do not change; to have another "
                "memory_format, convert the model before wrapping",
                slot.name,
                tuple(slot.param.stride()),
                tuple(slot.place.stride()),
            )
        self._warned = True

    def release(self) -> None:
        """Free the memory of a bucket whose slots are all in other buckets.

        Not of rounded parameters, whose exact values it has.
        """
        if self.master is None:
            self.gradients.release()
            self.outgoing = self.incoming = self.gradients.whole
            if self.sharded:
                self.parameters.release()
                self.travelling = self.parameters.whole
            self.reduction = self.gathering = self.wide_gradients = None

    def give_back(self) -> None:
        """Its optimizer lets go of the parameters, on every rank."""

    def expose(self) -> None:
        """Make ``.grad`` the averaged gradient, None where no rank used the parameter."""
        for slot in self.slots:
            slot.param.grad = None if slot.unused else slot.view


def line(slot: Slot) -> str:
    """A line that has to be the same for this parameter on all ranks; they may use several devices of a kind."""
    param = slot.param
    text = f"{slot.name}: shape {tuple(param.shape)}, {param.dtype} on {param.device.type}"
    if not param.is_contiguous():  # elements travel in the order in which they lie
        strides = zip(param.shape, param.stride(), strict=True)
        text += f", strides {tuple(stride for size, stride in strides if size > 1)}"
    return text if param.requires_grad else f"{text}, frozen"


def too_many(slot: Slot) -> TooManyGradients:
    """What to raise where a gradient comes that is in its bucket already."""
    return TooManyGradients(
        f"the gradient of {slot.name!r} was computed again before step(), after the {slot.expected} accumulation(s) of a "
        "backward pass: call optimizer.step() or optimizer.zero_grad() between backward passes; or, where a step always "
        "has so many, wrap with backward_passes_per_step; or run all passes but the last inside optimizer.no_sync()"
    )


def _not_dense(slot: Slot) -> TypeError:
    assert slot.param.grad is not None
    return TypeError(
        f"the gradient of {slot.name!r} has layout {slot.param.grad.layout}, and was dense or missing on all ranks "
        "when the buckets were planned; wrap the optimizer with sparse_as_dense=True"
    )
