"""A thread that issues partitions in the order that rank 0 decides, on a channel of its own.

    rank 0   ready ─▶ CreditQueue ─▶ told to the others ─▶ issued ─▶ done: credit returned ─▶ the next …
    others   ready ─▶ ┐
             told  ─▶ ┴─▶ issued as soon as both are so, in the order told

[Note: no step overtakes another] A rank may wait in its forward for a layer that rank 0 does not use this time, so
everything of one step is decided before anything of the next, which such a rank could not have ready.

[Note: one order, and nobody spins] Which gradient is ready when is each rank's own experience. Rank 0's decides for all:
its letters arrive in order in the channel's mailbox, and every rank issues its all-reduces in that order. A rank where a
partition is not ready yet waits for it: it becomes ready in backward or, unused, in step(). On rank 0 the thread waits
for one thing at a time: without credit, for the oldest operation under way (nothing else returns credit sooner); with
credit and nothing ready, for a gradient. The others wait for a letter, then for the gradients it names.

[Note: the same end on all ranks] Ranks close their dispatchers at different times. Whatever was submitted is issued all the
same: by rank 0 at once, whatever the credit, and by the others until they read rank 0's last letter, which names nothing.
What rank 0 names and a rank never submitted, where backward passes differed, ends that rank's thread.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

import comm_core
from bytescheduler_adapter.credit import CreditQueue
from comm_core import ReduceOp
from overlap.transport.checks import check_timeout
from overlap.transport.communicator import Communicator, Work
from overlap.transport.encoding import decode, encode
from overlap.transport.forks import Origin
from overlap.transport.operation import all_reduce

__all__ = ["Dispatcher", "Part", "PartsWork"]

Key = tuple[int, int, int, int]  # optimizer, bucket, how often that was submitted before, partition

_WAIT_SECONDS = 3600.0  # in one receive; the last letter wakes the thread
_LOOK_SECONDS = 1.0  # of rank 0, without credit, for close()
_JOIN_SECONDS = 5.0
_LAST: list[Key] = []


@dataclass(eq=False)
class Part:
    """One partition of a bucket, reduced from `send` into `recv` (which may be the same memory)."""

    send: torch.Tensor
    recv: torch.Tensor
    op: ReduceOp
    label: str
    work: Work | None = None  # once it is issued …
    issued: float = 0.0  # … and when, by time.perf_counter()

    @property
    def nbytes(self) -> int:
        return self.send.numel() * self.send.element_size()


class PartsWork:
    """All partitions of a bucket as one operation: what `overlap.transport.communicator.Work` promises."""

    def __init__(self, label: str, parts: list[Part], dispatcher: Dispatcher) -> None:
        self.op, self.nbytes = "all_reduce", sum(part.nbytes for part in parts)
        self.label, self._parts, self._dispatcher = label, parts, dispatcher
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    @property
    def operations(self) -> list[tuple[float, Work]]:
        """See :func:`overlap.transport.work.operations`."""
        return [(part.issued, part.work) for part in self._parts if part.work is not None]

    def wait(self, timeout: float | None = None) -> None:
        limit = check_timeout("wait", timeout)
        until = None if limit is None else time.monotonic() + limit
        for part in self._parts:
            work = self._dispatcher.await_issue(part, self, until)
            work.wait(None if until is None else max(0.0, until - time.monotonic()))

    def done(self) -> bool:
        return all(part.work is not None and part.work.done() for part in self._parts)

    def exception(self) -> comm_core.Error | None:
        errors = (part.work.exception() for part in self._parts if part.work is not None)
        return next((error for error in errors if error is not None), None)

    def order_before(self, stream: int) -> None:
        self.wait()

    def describe(self) -> str:
        issued = sum(part.work is not None for part in self._parts)
        return f"all_reduce {self.label!r} ({issued} of {len(self._parts)} partitions issued, {self.seconds:.1f} s)"


_OVER = "the session that this optimizer belongs to was shut down"


class Dispatcher:
    """Issues the partitions of one optimizer at a time on `channel`, in an order that is the same on all ranks.

    It is ended by :meth:`close`, then :meth:`join`, on all ranks.
    """

    def __init__(self, channel: Communicator) -> None:
        self._channel, self._origin = channel, Origin()
        self._changed = threading.Condition()
        self._ready: dict[Key, Part] = {}
        self._queue: CreditQueue[Key] = CreditQueue()
        self._failure: BaseException | None = None
        self._closing = self._given_up = False
        self._registered = 0
        self._steps: Counter[int] = Counter()  # by optimizer
        self._submitted: Counter[tuple[int, int]] = Counter()  # one may be submitted again before its credit returned
        run = self._lead if channel.rank == 0 else self._follow
        self._thread = threading.Thread(target=self._run, args=(run,), name="dear-dispatcher", daemon=True)
        self._thread.start()

    def register(self) -> int:
        """The next optimizer's number; the same on all ranks, which make their optimizers in the same order."""
        self._registered += 1
        return self._registered

    def submit(self, optimizer: int, bucket: int, parts: list[Part], label: str, credit: int) -> PartsWork:
        """Hand in the partitions of a bucket, which are ready; the bucket's number is its priority.

        `credit`: how many bytes may be under way when one of them is issued.
        """
        self._origin.require()
        work = PartsWork(label, parts, self)
        with self._changed:
            if self._closing:
                raise comm_core.InvalidUsage(f"{label}: {_OVER}")
            # Who ends the session must know of them before this thread comes to issue them.
            self._channel.promised = self._channel.committed + len(parts)
            times = self._submitted[optimizer, bucket]
            self._submitted[optimizer, bucket] += 1
            step = self._steps[optimizer] = max(self._steps[optimizer], times)  # every bucket is submitted once a step
            for number, part in enumerate(parts):
                key = (optimizer, bucket, times, number)
                self._ready[key] = part
                if self._channel.rank == 0:
                    self._queue.push(key, bucket, part.nbytes, credit, step)
            self._changed.notify_all()
        return work

    def await_issue(self, part: Part, whole: PartsWork, until: float | None) -> Work:
        """Block until `part` was issued. Raises what ended the dispatcher, or ``comm_core.TimeoutError``."""
        with self._changed:
            while part.work is None:
                if self._failure is not None:
                    raise comm_core.TransportError(f"{whole.describe()}: {self._failure}") from self._failure
                left = None if until is None else until - time.monotonic()
                if left is not None and left <= 0:
                    raise comm_core.TimeoutError(f"{whole.describe()} was not done in time")
                self._changed.wait(left)
            return part.work

    def _run(self, body: Callable[[], None]) -> None:
        failure: BaseException = comm_core.TransportError("rank 0, which decides the order, issues nothing any more")
        try:
            body()
        except BaseException as error:
            failure = error
        with self._changed:  # whoever waits for a partition that is not issued is told
            self._failure = comm_core.InvalidUsage(_OVER) if self._closing else failure
            self._changed.notify_all()

    def _issue(self, part: Part) -> Work:
        issued = time.perf_counter()
        work = self._channel.start(all_reduce(part.send, part.recv, part.op, label=part.label))
        with self._changed:
            part.work, part.issued = work, issued
            self._changed.notify_all()
        return work

    def _lead(self) -> None:
        under_way: deque[tuple[Key, Work]] = deque()
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._queue or self._closing)
                    if self._closing:
                        break
                    keys = self._queue.admit()
                if keys:
                    under_way.extend(zip(keys, self._lead_with(keys), strict=True))
                else:
                    with contextlib.suppress(comm_core.TimeoutError):
                        under_way[0][1].wait(_LOOK_SECONDS)
                with self._changed:
                    while under_way and under_way[0][1].done():
                        self._queue.release(under_way.popleft()[0])
            if not self._given_up:
                self._lead_with(self._queue.admit_all())
        finally:
            if not self._given_up:
                with contextlib.suppress(Exception):  # of a connection that is lost
                    self._tell(_LAST)

    def _lead_with(self, keys: list[Key]) -> list[Work]:
        if keys:
            self._tell(keys)
        with self._changed:
            parts = [self._ready.pop(key) for key in keys]
        return [self._issue(part) for part in parts]

    def _tell(self, keys: list[Key]) -> None:
        letter = encode(keys)
        for rank in range(1, self._channel.size):
            self._channel.post(rank, letter)

    def _follow(self) -> None:
        while True:
            letter = self._channel.receive_post(_WAIT_SECONDS)
            if letter is None:
                continue
            keys = decode(letter[1])
            if keys == _LAST:
                return
            for key in keys:
                with self._changed:
                    self._changed.wait_for(lambda key=key: key in self._ready or self._closing)  # type: ignore[misc]
                    if self._given_up or key not in self._ready:
                        return
                    part = self._ready.pop(key)
                self._issue(part)

    def close(self, *, given_up: bool) -> None:
        """Stop taking partitions.

        What was submitted is issued, as on all ranks, and who waits for anything else is told.

        `given_up`: ranks have not submitted the same, so nothing more is issued.
        """
        with self._changed:
            self._closing, self._given_up = True, given_up
            self._changed.notify_all()
        if given_up and self._channel.rank > 0:
            self._channel.post(self._channel.rank, encode(_LAST))

    def join(self, heed: Callable[[], None] | None = None) -> None:
        """Wait for the thread to end after :meth:`close`; without `heed`, which raises where ranks are lost, for some
        seconds, as it may wait for other ranks."""
        self._thread.join(_LOOK_SECONDS if heed else _JOIN_SECONDS)
        while heed and self._thread.is_alive():
            heed()
            self._thread.join(_LOOK_SECONDS)
        self._channel.promised = self._channel.issued
