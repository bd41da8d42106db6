"""A bucket whose whole parameters and gradients a rank has while they are used: between uses it keeps its share.

before_gather ─▶ gathered ─▶ unshard ─▶ … ─▶ reshard ─▶ rest      when is decided by `overlap.core.unsharding`

Where a group of ranks gathers it for backward, each of them has a share of it meanwhile:

reshard(group) ─▶ gather_in_group ─▶ gathered
"""

from __future__ import annotations

import math
from typing import Any

import torch

from overlap.core.bucket import Bucket, Freed, Slot
from overlap.core.buckets.flat_buffer import FlatBuffer
from overlap.core.gates.holders import Strangers
from overlap.job.memory.host_memory import HostMemory
from overlap.plan.partition import BucketSpec, pieces
from overlap.transport.checks import balanced_split
from overlap.transport.communicator import Communicator, Start, Work
from overlap.transport.cuda.memory import pinned
from overlap.transport.cuda.streams import Moment
from overlap.transport.operation import all_gather

__all__ = ["FreedBucket", "FreesGradients", "constant"]


def constant(like: torch.Tensor, value: float) -> torch.Tensor:
    """A tensor of the shape and type of `like`, all `value`, with memory for one element."""
    return like.new_full((), value).expand(like.shape)


class FreesGradients(Bucket):
    """A bucket whose whole gradients have memory only until they are reduced. Its arguments are those of :class:`.Bucket`.

    A subclass gives its slots their :class:`.Freed` tensors.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._kept: torch.Tensor | None = None
        self._sent: FlatBuffer | None = None  # gradients that travel in another type …
        self._received: FlatBuffer | None = None  # … and this rank's share of them; on a device, if that is offloaded …
        self._landed = self.gradients.shard  # … to here
        self._brought: Moment | None = None  # [Note: offloaded shards]: the last copy to the device …
        self._fetched: Moment | None = None  # … and from it
        if self._offload is not None:
            self.incoming = self.receives(self.gradients.whole.dtype)
            self.received()

    def hold_gradients(self) -> None:
        """Gradients, which are in the bucket, are about to be reduced: there is memory for what they become on the way."""
        for buffer in (self._sent, self._received):
            if buffer is not None:
                buffer.restore()

    def fetch_share(self) -> None:
        assert self._offload is not None, "shares of others are there"
        with self._offload.aside():
            self._fetched = self._offload.fetch([(self._landed, self.incoming)])
        self.received()

    def await_copies(self) -> None:
        fetched, self._fetched = self._fetched, None
        brought, self._brought = self._brought, None
        for copied in (fetched, brought):
            if copied is not None and not copied.done():
                copied.wait()

    def free_gradients(self) -> None:
        self.gradients.free()
        if self._sent is not None:
            self._sent.free()

    def sends(self, dtype: torch.dtype) -> torch.Tensor:
        whole = self.gradients.whole
        self._sent = FlatBuffer(self.spec, slice(0, 0), dtype, whole.device, freed=True)
        return self._sent.whole

    def receives(self, dtype: torch.dtype) -> torch.Tensor:
        shard, place = self.gradients.shard, self.gradients.whole.device
        spec = BucketSpec((), (), shard.numel(), shard.numel())
        self._received = FlatBuffer(spec, slice(0, 0), dtype, place, freed=True)
        if self._offload is not None:
            self._landed = shard if dtype is shard.dtype else pinned(shard.numel(), dtype, place)
        return self._received.whole

    @property
    def arrived(self) -> torch.Tensor:
        return self.incoming if self._offload is None else self._landed

    def received(self) -> None:
        if self._received is not None:
            self._received.free()

    def line(self, host: HostMemory) -> slice:
        """The elements that ranks with this one's place on their hosts own together."""
        numel = len(self.shares) // host.comm.size * self.shares[0]
        first = self.own.start // numel * numel
        return slice(first, first + numel)

    def stand_in(self) -> None:
        for slot in self.slots:
            slot.param.grad = None if slot.unused or slot.freed is None else slot.freed.sent

    def keep_averages(self) -> None:
        if self._kept is None:
            self._kept = self.gradients.shard.clone()

    def add_kept(self) -> None:
        kept, self._kept = self._kept, None
        if kept is not None:
            numels = [slot.param.numel() for slot in self.slots]
            for place, _, inside in pieces(self.spec, numels, self.own):
                slot = self.slots[place]
                if slot.freed is not None and slot.aside is slot.freed.sent:
                    self.gradients.shard[inside].add_(kept[inside])


class FreedBucket(FreesGradients):
    """A bucket that its plan frees. Its arguments are those of :class:`.Bucket`.

    [Note: offloaded shards] Copies between the device and shards in the host's memory are made on a stream beside the
    computation's:

        forward, backward   bring ─▶ gather                           the host goes on
        backward            reduce ─▶ fetch
        step()                            ─▶ the host waits ─▶ update

    The host waits for them before it reads or writes a shard.

    [Note: once for all ranks of a host]
    Where parameters :meth:`lie_on` a host, passes of all its ranks read one memory, and each rank gathers into its part of
    it what those in its place on other hosts own; see `overlap.core.buckets.host_bucket`. Shards, which are updated, are
    each rank's own, as are exact parameters for whoever reads or writes them between steps.
    """

    opened = False  # parameters are whole and exact, for whoever reads or writes them
    _away = False  # they have left the flat buffer for this rank's shard

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._on_host: FlatBuffer | None = None  # [Note: once for all ranks of a host]: what passes use …
        self._coming: torch.Tensor | None = None  # … and the part of it that this rank gathers
        self._share: FlatBuffer | None = None  # of whole parameters, as passes use them, among a group of ranks …
        self._from_shares: Start | None = None  # … by which all of these become whole again
        self.parameters.shard.copy_(self.parameters.whole[self.own])
        for place, slot in enumerate(self.slots):
            whole, used = (each.view(place, slot.param) for each in (self.parameters, self._used))
            if slot.freed is None:
                away, sent, zero = (constant(whole, value) for value in (math.nan, math.nan, 0))
                gone = constant(used, math.nan) if self.narrow else away
                slot.freed = Freed(whole, used, away, gone, sent, zero)
            else:
                slot.freed = slot.freed._replace(whole=whole, used=used)
            if self.narrow:
                slot.param.grad_dtype = whole.dtype  # autograd widens gradients, each once
        self._away = True
        self.reshard()
        if self.master is not None and self.master.buffer is not None and not self.narrow:
            self.master.buffer.free()
        self.rest()
        self.free_gradients()

    def adopt(self, strangers: Strangers | None = None) -> list[Slot]:
        """As :meth:`.Bucket.adopt`; parameters that are away stay there.

        Raises ``RuntimeError`` where a script has replaced the memory of one.
        """
        if not self._away:
            return super().adopt(strangers)
        if self.offloads:
            self.await_copies()
        self._refuse_replaced()
        return []

    @property
    def _used(self) -> FlatBuffer:
        """What parameters show while passes use them."""
        if self._on_host is not None:
            return self._on_host
        narrow = None if self.master is None or not self.master.used else self.master.buffer
        return self.parameters if narrow is None else narrow

    @property
    def narrow(self) -> bool:
        """Whether parameters are of 16 bits while passes use them."""
        return self.master is not None and self.master.used

    @property
    def on_host(self) -> bool:
        """Whether passes use parameters in the memory of the host."""
        return self._on_host is not None

    def lie_on(self, host: HostMemory | None) -> None:
        """From now on, passes use parameters in the memory of `host`, or in this rank's own if that is None.

        While they are not used, on every rank. Raises ``MemoryError`` on all ranks of a host without room.
        """
        whole = self.parameters.whole
        self._on_host = self._coming = None
        if host is not None:
            memory = host.zeros(whole.numel(), whole.dtype)
            self._on_host = FlatBuffer(self.spec, slice(0, 0), whole.dtype, whole.device, memory=memory)
            self._coming = memory[self.line(host)]
        for place, slot in enumerate(self.slots):
            assert slot.freed is not None
            slot.freed = slot.freed._replace(used=self._used.view(place, slot.param))

    def release(self) -> None:
        self._on_host = self._coming = None
        self._share = self._from_shares = None
        super().release()

    def before_gather(self, *, exact: bool, poison: bool) -> None:
        """Parameters are about to be gathered: rounded, where they are used so, or `exact`. `poison`: as in `reshard`."""
        into, master = self.parameters if exact else self._used, None if exact else self.master
        there = into.there
        into.restore()
        if poison and not there:
            into.whole.fill_(math.nan)
        if into is self._on_host:
            assert self._coming is not None
            self.travelling = self._coming
            return
        self.travelling = self.parameters.whole if master is None else master.wire
        self.wide_parameters = None if master is None else self._wide
        if master is not None:
            assert master.buffer is not None
            master.buffer.restore()
            if self.wide_parameters is None:
                if self.offloads:
                    self.await_copies()  # nearly always of a gather that is over
                master.pack()

    def bring(self) -> None:
        """Copy this rank's share, which is offloaded, to its place in what is gathered, on the current stream."""
        if self._offload is not None:
            rounded = self.master is not None and self.travelling is self.master.wire
            mine = self.master.packed if self.master is not None and rounded else self.parameters.shard
            self._brought = self._offload.put(self.travelling[self.own], mine)

    def gather_in_group(self, group: Communicator, *, poison: bool) -> Work:
        """Gather parameters from the shares that :meth:`reshard` has left; those that are whole stay so.

        On every rank of the `group`.
        """
        into = self._used
        if self._share is None or not self._share.there:
            assert into.there, f"{self!r} is neither whole nor shared"
            self._keep_share(group)
        elif not into.there:
            into.restore()
            if poison:
                into.whole.fill_(math.nan)
        self.travelling, self.wide_parameters = into.whole, None
        if self._from_shares is None:
            assert self._share is not None
            self._from_shares = group.prepare(all_gather(self._share.whole, into.whole, label=self.label))
        return self._from_shares()

    def _keep_share(self, group: Communicator) -> None:
        whole = self._used.whole
        mine = whole.split(balanced_split(whole.numel(), group.size))[group.rank]
        if self._share is None:
            spec = BucketSpec((), (), mine.numel(), mine.numel())
            self._share = FlatBuffer(spec, slice(0, 0), whole.dtype, whole.device, freed=True)
        self._share.restore()
        self._share.whole.copy_(mine)

    def gathered(self) -> None:
        """Parameters have come."""
        if self._offload is not None and self._brought is not None:
            self._brought.order_before(self._offload.current())  # where nothing travels, nobody else waits
        if self._share is not None:
            self._share.free()
        master = self.master
        if master is None or master.used or self.travelling is not master.wire:
            return
        if self.wide_parameters is None:
            master.land()
        assert master.buffer is not None
        master.buffer.free()

    def read_here(self) -> None:
        """What this thread computes next reads parameters, which have come. On a device others may have awaited them."""
        self._used.restore()

    def unshard(self, *, exact: bool = False) -> None:
        """Parameters, which were gathered, are whole. Raises ``RuntimeError`` for one that was converted meanwhile."""
        self.opened = exact
        for slot in self.slots:
            assert slot.freed is not None
            param, freed = slot.param, slot.freed
            if param.dtype is not freed.whole.dtype and param.dtype is not freed.used.dtype:
                raise RuntimeError(
                    f"parameter {slot.name!r} was converted from {freed.whole.dtype} to {param.dtype} while each rank has "
                    "a share of it: convert the model before its optimizer is made"
                )
            param.data = freed.whole if exact else freed.used

    def reshard(self, *, poison: bool = False, group: Communicator | None = None) -> None:
        """Parameters are away, and their memory is free; with `poison`, it is NaN instead.

        This rank keeps a share of them among the ranks of a `group`, if there is one; else it has none any more.
        """
        if group is not None:
            self._keep_share(group)
        elif self._share is not None:
            self._share.free()
        self.opened = False
        for slot in self.slots:
            assert slot.freed is not None
            slot.param.data = slot.freed.gone
        for buffer in {self.parameters, self._used} - {self._on_host}:  # which others read
            if not poison:
                buffer.free()
            elif buffer.there:
                buffer.whole.fill_(math.nan)
                buffer.there = False

    def rest(self) -> None:
        """Parameters, which no pass uses, are away, and of their own type.

        Not while a graph is made: with another type comes another end of it, and one that uses a parameter twice would
        bring its gradient in two parts.
        """
        for slot in self.slots:
            assert slot.freed is not None
            slot.param.data = slot.freed.away

    def _refuse_replaced(self) -> None:
        for slot in self.slots:
            assert slot.freed is not None
            if slot.param.data_ptr() not in slot.freed.places:
                raise RuntimeError(
                    f"the memory of parameter {slot.name!r} was replaced (p.data = …), and each rank keeps a share of it "
                    "elsewhere: load values by model.load_state_dict(), on every rank"
                )
