"""A bucket whose whole parameters lie once in the memory of each host.

Shards lie in this order: those of the first ranks of all hosts, those of the second ranks, … Ranks with the same place
on their hosts are a line, and a line gathers its own shards, straight into the memory of all hosts:

    host 0  ranks 0 1     line 0: ranks 0 2     memory of a host   │ shard of 0 │ shard of 2 │ shard of 1 │ shard of 3 │
    host 1  ranks 2 3     line 1: ranks 1 3     gathered by        │ ──────── line 0 ─────── │ ──────── line 1 ─────── │

[Note: who waits for whom]
Before a rank writes to parameters, every rank has read them for the last time: step() begins with a tally, to which each
comes after its backward pass ([Note: nobody overtakes a step] in `overlap.core.step`). Before a rank reads what others
write, they have written it: behind the gathering of a bucket there is a barrier of all ranks, on the same communicator,
which each enters when its line has gathered. While buckets are made, all ranks of a host write the same values; the first
update of a bucket waits for its reduction, which each rank issues after that.

Of a freed bucket whose parameters lie on a host (`overlap.core.buckets.freed`), another barrier comes before the gathering:
a rank issues that when it has freed them, so all have read them for the last time. A tally would not do: a script may load
other values between two evaluations, on one rank before another.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from overlap.core.bucket import Bucket, Freed, Slot
from overlap.core.buckets.freed import FreesGradients, constant
from overlap.core.gates.holders import Strangers
from overlap.core.wire import DecoupledCollectives
from overlap.job.memory.host_memory import HostMemory
from overlap.transport.communicator import Communicator
from overlap.transport.memory import to_flat
from overlap.transport.operation import barrier

__all__ = ["HOST_COLLECTIVES", "TURN_COLLECTIVES", "HostBucket"]


class HostBucket(FreesGradients):
    """A bucket whose plan has it in the memory of `host`. Its other arguments are those of :class:`.Bucket`.

    Made on every rank of the host, in the same order.
    """

    _updates = False  # other ranks of the host may write to their shares

    def __init__(self, *args: Any, host: HostMemory, **options: Any) -> None:
        super().__init__(*args, allocate=host.zeros, **options)
        self.coming = self.line(host)
        self.travelling = self.parameters.whole[self.coming]
        for place, slot in enumerate(self.slots):
            whole = self.parameters.view(place, slot.param)
            sent, zero = constant(whole, math.nan), constant(whole, 0)
            before = slot.freed
            if before is not None and before.sent.dtype is whole.dtype and not any(before.sent.stride()):
                sent, zero = before.sent, before.zero  # which ``.grad`` may be; no conversion has written to them
            slot.freed = Freed(whole, whole, whole, whole, sent, zero)
        self.free_gradients()

    def adopt(self, strangers: Strangers | None = None) -> list[Slot]:
        self._updates = strangers is not None
        return super().adopt(strangers)

    def _take(self, slot: Slot, home: torch.Tensor, offset: int) -> None:
        if not self._updates:
            super()._take(slot, home, offset)
            return
        start, stop = max(offset, self.own.start), min(offset + home.numel(), self.own.stop)
        if start < stop:  # the others' shares are theirs to write
            values = to_flat(slot.param.detach(), home)[start - offset : stop - offset]
            self.parameters.whole[start:stop].copy_(values)

    def give_back(self) -> None:
        for slot in self.slots:
            slot.param.data = slot.param.detach().clone()


class _HostCollectives(DecoupledCollectives):
    """Gathers a bucket in lines, and has all ranks wait for all lines: [Note: who waits for whom]."""

    def gather(self, comm: Communicator, bucket: Bucket) -> bool:
        held = super().gather(comm, bucket)
        bucket.work = comm.start(barrier(label=bucket.label))  # begins when what was issued before is done
        return held


class _TurnCollectives(_HostCollectives):
    """The same of freed buckets: all ranks have read them for the last time before any of them writes."""

    def gather(self, comm: Communicator, bucket: Bucket) -> bool:
        comm.start(barrier(label=bucket.label))
        return super().gather(comm, bucket)


HOST_COLLECTIVES = _HostCollectives()
TURN_COLLECTIVES = _TurnCollectives()
