"""Waits for parameters whose new values are in flight or still to be computed when ``step()`` returns."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

import torch

from overlap.core.bucket import Bucket, Phase
from overlap.core.clock import StepClock
from overlap.core.handles import shared
from overlap.transport.communicator import Communicator
from overlap.transport.forks import Origin, settle_before_forks
from overlap.transport.work import Work, arrive

__all__ = ["Transit"]

log = logging.getLogger("dear")


class Transit:
    """The buckets whose all-gather is in flight on one of the `lanes`, or whose update was left for later.

    With `poison`, parameters of other ranks' shards are NaN until they come, so that a missed wait shows.
    """

    def __init__(self, lanes: Sequence[Communicator], *, poison: bool) -> None:
        self._lanes, self._poison = tuple(lanes), poison and lanes[0].size > 1
        self.busy = False  # whether anything is to be awaited, or to be raised
        self.pending: dict[Bucket, Callable[[Bucket], None] | None] = {}  # by what is left to do on arrival
        self.landing: dict[Bucket, Work] = {}  # awaited by one stream of a device; others that read wait, too
        self._arriving: set[Bucket] = set()  # their updates may look at parameters themselves
        self._origin = Origin()
        settle_before_forks(self)
        self._lock = threading.RLock()  # two threads may look at one parameter; both see its final value
        self._unraised: Exception | None = None  # what went wrong before a fork
        self.held: list[Bucket] = []  # of this step; others have tensors over their parameters
        self._said = False
        self.clock: StepClock | None = None
        self.entry: list[Bucket] = []  # hold parameters no gate hands out: awaited when any forward starts

    def send(self, bucket: Bucket) -> None:
        """Issue the all-gather of a bucket whose shard was updated; of one that is freed, forward does."""
        for slot in bucket.slots:  # one by one: torch 2.4 takes no list
            torch.autograd.graph.increment_version(slot.param)  # written behind autograd's back: old graphs must notice
        if bucket.frees_gradients:
            bucket.stand_in()
        if bucket.freed:
            bucket.advance(Phase.FILLING)
            return
        if bucket.master is not None and bucket.wide_parameters is None:
            bucket.master.pack()
        if self._poison:
            mine = bucket.parameters.whole[bucket.own].clone()
            bucket.parameters.whole[bucket.coming] = float("nan")
            if bucket.master is None:
                bucket.parameters.whole[bucket.own] = mine
        if bucket.collectives.gather(self._lanes[bucket.lane], bucket):
            self.held.append(bucket)
        bucket.advance(Phase.GATHERING)
        self.landing.pop(bucket, None)
        self.pending[bucket], self.busy = None, True

    def leave(self, bucket: Bucket, update: Callable[[Bucket], None]) -> None:
        """Leave the update of `bucket` for the moment when its parameters are needed."""
        if any(shared(slot.param) for slot in bucket.slots):
            self.held.append(bucket)
        bucket.advance(Phase.DUE)
        self.landing.pop(bucket, None)
        self.pending[bucket], self.busy = update, True

    def arrive(self, bucket: Bucket) -> None:
        """Wait until the parameters of `bucket` are final. From any thread."""
        if self._unraised is not None:
            self._raise_late()
        if bucket not in self.pending:
            if bucket in self.landing:
                self._follow(bucket)
            return
        if self._origin.elsewhere:  # where it could not be awaited before the fork
            self._origin.require()
        with self._lock:
            if bucket not in self.pending or bucket in self._arriving:
                return
            self._arriving.add(bucket)
            since = None if self.clock is None else self.clock.now()
            try:
                update = self.pending[bucket]
                self._complete(bucket, update)
                if self.clock is not None:
                    self.clock.waited(since, None if update is None else bucket)
            finally:
                self._arriving.discard(bucket)
                del self.pending[bucket]  # last: from now on nobody waits
                self.busy = bool(self.pending or self.landing) or self._unraised is not None

    def _follow(self, bucket: Bucket) -> None:
        """Another stream than the one that awaited `bucket` may read it before the device is past the gather."""
        with self._lock:
            work = self.landing.get(bucket)
            if work is not None and not arrive(work):
                del self.landing[bucket]
                self.busy = bool(self.pending or self.landing) or self._unraised is not None

    def _complete(self, bucket: Bucket, update: Callable[[Bucket], None] | None) -> None:
        if update is not None:
            update(bucket)
        else:
            if bucket.work is not None:
                if arrive(bucket.work):
                    self.landing[bucket] = bucket.work
                bucket.work = None
            if bucket.master is not None and bucket.wide_parameters is None:
                bucket.master.land()
        bucket.advance(Phase.FILLING)

    def arrive_entry(self) -> None:
        """When a forward starts, wait for the parameters that it may use without passing a gate."""
        if self._unraised is not None:
            self._raise_late()
        if self.busy:
            for bucket in self.entry:
                self.arrive(bucket)

    def settle(self) -> None:
        """Wait for all values before a fork; an error is raised later. See :class:`overlap.transport.forks.Settles`."""
        if self._origin.elsewhere:
            return
        try:
            self.arrive_all()
        except Exception as error:
            self._unraised, self.busy = error, True

    def _raise_late(self) -> None:
        if self._unraised is not None:
            error, self._unraised = self._unraised, None
            self.busy = bool(self.pending or self.landing)
            raise error

    def arrive_held(self) -> None:
        """At the end of ``step()``, wait for values that others may read through tensors of their own."""
        held, self.held = self.held, []
        if not self._said and self._lanes[0].rank == 0:
            log.warning(
                "the script has a tensor over the memory of a parameter, %r or one that travels with it (w = "
                "layer.weight.data, a state_dict() or a graph that was kept): step() waits for the new values of such "
                "parameters, which then are not hidden behind the next forward (this is said once)",
                held[0].slots[0].name,
            )
        self._said = True
        for bucket in held:
            self.arrive(bucket)

    def arrive_all(self) -> None:
        self._raise_late()
        for bucket in [*self.pending, *self.landing]:
            self.arrive(bucket)
