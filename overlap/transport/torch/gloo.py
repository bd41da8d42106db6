"""A communicator over torch.distributed's gloo, for comparisons: ``DEAR_TRANSPORT=gloo``.

It has no schedules of its own. A daemon thread carries out operations in the order in which they were issued, over a gloo
context that the user's collectives do not share. Reductions are summed in the order of ranks, by comm_core's rules.

[Note: inference mode]
What is issued inside ``torch.inference_mode()`` may be written nowhere else, and that mode is a thread's own. Ordinary
tensors may be written there as ever, so every operation runs in it.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import profiler
from torch.distributed.distributed_c10d import PrefixStore

import comm_core
from comm_core import ReduceOp, TransportError
from overlap.transport.checks import balanced_split, check_average, check_rank, check_timeout, checked
from overlap.transport.communicator import Communicator, Start, Work
from overlap.transport.compilers import outside_compilers
from overlap.transport.forks import Origin
from overlap.transport.operation import NOTHING, REDUCTIONS, Collective, Operation, all_gather
from overlap.transport.reduction import combine_all
from overlap.transport.torch.mailbox import OwnMailbox, StoreMailbox
from overlap.transport.torch.rendezvous import Rendezvous, connecting

__all__ = ["GlooCommunicator", "GlooWork", "tear_down"]

# A rank may be away for hours (an evaluation on rank 0); that is the watchdog's to report, not the transport's to end.
_FOREVER = datetime.timedelta(days=7)
_AT_ONCE = datetime.timedelta(milliseconds=1)
_TAG_OF_THE_END = 1 << 20
_AFTER = "the communicator has failed before, so this operation was not begun; its first failure"


def tear_down(gloo: Any) -> None:
    """Close all connections of a ``ProcessGroupGloo``, so that every wait on them ends with an error, on the peers too."""
    for step in range(
        1, gloo.size()
    ):  # from a peer whose connection is closed already a receive fails, and closes nothing
        peer = (gloo.rank() + step) % gloo.size()
        with contextlib.suppress(RuntimeError):
            gloo.recv([torch.empty(1, device="cpu")], peer, _TAG_OF_THE_END).wait(_AT_ONCE)


class GlooWork:
    """An issued operation, a `overlap.transport.communicator.Work`."""

    def __init__(self, kind: str, label: str, nbytes: int, where: str) -> None:
        self.op, self.label, self.nbytes = kind, label or kind, nbytes
        self._what = f"{kind} {label!r} ({where}, {nbytes} bytes" if label else f"{kind} ({where}, {nbytes} bytes"
        self._issued, self._ended = time.monotonic(), 0.0
        self._result: Future[None] = Future()
        self._origin = Origin()

    @property
    def seconds(self) -> float:
        return (self._ended or time.monotonic()) - self._issued

    def wait(self, timeout: float | None = None) -> None:
        limit = check_timeout("wait", timeout)
        if not self.done():
            self._origin.require()  # nobody would ever finish it
        try:
            self._result.result(limit)
        except NotYet:
            raise comm_core.TimeoutError(f"{self.describe()} was not done within {limit:g} s") from None

    def done(self) -> bool:
        return self._result.done()

    def exception(self) -> comm_core.Error | None:
        error = self._result.exception() if self.done() else None
        assert error is None or isinstance(error, comm_core.Error)
        return error

    def order_before(self, stream: int) -> None:
        self.wait()

    def describe(self) -> str:
        state = "running" if not self.done() else "failed" if self.exception() else "done"
        return f"{self._what}, {state}, {self.seconds:.1f} s)"

    def finish(self, error: BaseException | None = None) -> None:
        self._ended = time.monotonic()
        if error is None:
            self._result.set_result(None)
        else:
            kind = type(error) if isinstance(error, comm_core.Error) else TransportError
            self._result.set_exception(kind(f"{self._what}): {error}"))


@contextlib.contextmanager
def _unrecorded() -> Iterator[None]:
    """A context in which this thread hides what it does from torch's profiler.

    torch 2.13's crashes, when its result is freed, where an operation of gloo's ends after the profile has. What is issued
    and waited for is shown without that (`overlap.transport.work`).
    """
    if not profiler._is_profiler_enabled:
        yield
        return
    torch.autograd._enable_record_function(False)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.autograd._enable_record_function(True)  # type: ignore[attr-defined]


class _Line:
    """Operations, carried out one after the other on a daemon thread. After one has failed, every later one fails."""

    def __init__(self, name: str) -> None:
        self._waiting: queue.SimpleQueue[tuple[GlooWork, Callable[[], object]] | None] = queue.SimpleQueue()
        self.unfinished: list[GlooWork] = []
        self._failure: comm_core.Error | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @outside_compilers
    def submit(self, operation: GlooWork, act: Callable[[], object]) -> GlooWork:
        self.unfinished.append(operation)
        self._waiting.put((operation, act))
        return operation

    def _run(self) -> None:
        while (entry := self._waiting.get()) is not None:
            operation, act = entry
            error: BaseException | None = self._failure
            try:
                if error is None:
                    with torch.inference_mode(), _unrecorded():
                        act()
            except BaseException as raised:  # it belongs to whoever waits for the operation
                error = raised
            del act, entry  # they keep the caller's tensors alive, and only until here
            self.unfinished.remove(operation)
            operation.finish(error)
            if error is not None and self._failure is None:
                self._failure = TransportError(f"{_AFTER}: {operation.exception()}")

    def close(self) -> None:
        """Carry out what was issued, then end the thread."""
        self._waiting.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join()


class GlooCommunicator(Communicator):
    """The ranks that find each other at `meeting`. `end` is called once it is closed."""

    backend = "gloo"

    def __init__(
        self, meeting: Rendezvous, rank: int, size: int, *, name: str = "world", end: Callable[[], object] = bool
    ) -> None:
        self._meeting, self.rank, self.size, self.name, self._end = meeting, rank, size, name, end
        self._origin, self._closed = Origin(), False
        self._gloo: Any = None
        if size > 1:
            with connecting():
                store = PrefixStore("collectives", meeting.connect(name))
                self._gloo = dist.ProcessGroupGloo(store, rank, size, meeting.patience)
        self._line = _Line(f"dear-{name}")
        self._mailbox = StoreMailbox(meeting, f"{name}/mail", rank) if size > 1 else OwnMailbox()
        self._splits = itertools.count()

    def _check_usable(self) -> None:
        self._origin.require()
        if self._closed:
            raise comm_core.InvalidUsage(f"communicator {self.name} is closed")

    def prepare(self, operation: Operation) -> Start:
        one = checked(operation, self.rank, self.size)
        if one.kind in REDUCTIONS:
            check_average(one.kind.value, one.op, one.send)

        def start() -> Work:
            self._check_usable()
            if one.wide is not None:
                one.send.copy_(one.wide.send)
            work = GlooWork(one.kind.value, one.label, one.nbytes, f"rank {self.rank} of {self.size}")
            return self._issued(self._line.submit(work, lambda: self._carry_out(one)))

        return start

    # - On the thread: all of it is made of a few of gloo's collectives, on bytes

    def _carry_out(self, one: Operation) -> None:
        kind, send, recv = one.kind, one.send, one.recv
        sent, received = one.send_counts or (), one.recv_counts or ()
        if kind is Collective.REDUCE_SCATTER:
            self._reduce_parts(send, recv, sent, one.op)
        elif kind is Collective.ALL_GATHER:
            self._gather(send, recv, received)
        elif kind is Collective.ALL_TO_ALL:
            self._to_all(send, recv, sent, received)
        elif kind is Collective.BROADCAST:
            self._copy_from(recv, one.root)
        elif kind is Collective.BARRIER:
            token = torch.zeros(1 + self.size, dtype=torch.uint8, device="cpu")
            self._gather(token[:1], token[1:], [1] * self.size)
        else:
            self._reduce_all(send, torch.empty_like(send) if recv is NOTHING else recv, one.op)
        if one.wide is not None:
            one.wide.recv.copy_(recv)

    def _to_all(self, send: torch.Tensor, recv: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> None:
        """Part i of `send` goes to rank i, and part j of `recv` comes from rank j; counts are elements."""
        if self._gloo is None:
            recv.copy_(send)
            return
        source, target, item = send.view(torch.uint8), recv.view(torch.uint8), send.element_size()
        parts = [count * item for count in received], [count * item for count in sent]
        self._gloo.alltoall_base(target, source, *parts).wait(_FOREVER)

    def _reduce_parts(self, send: torch.Tensor, out: torch.Tensor, counts: Sequence[int], op: ReduceOp) -> None:
        everybody = torch.empty(self.size * out.numel(), dtype=send.dtype, device="cpu")
        self._to_all(send, everybody, counts, [out.numel()] * self.size)
        combine_all(op, list(everybody.view(self.size, -1)), out, self.size)

    def _gather(self, send: torch.Tensor, recv: torch.Tensor, counts: Sequence[int]) -> None:
        if self._gloo is None:
            recv.copy_(send)
            return
        largest = max(counts)
        mine = torch.zeros(largest, dtype=send.dtype, device="cpu")
        mine[: send.numel()] = send
        everybody = torch.empty(self.size * largest, dtype=send.dtype, device="cpu")
        if largest:
            self._gloo._allgather_base(everybody.view(torch.uint8), mine.view(torch.uint8)).wait(_FOREVER)
        for part, row, count in zip(recv.split(list(counts)), everybody.view(self.size, largest), counts, strict=True):
            part.copy_(row[:count])

    def _reduce_all(self, send: torch.Tensor, recv: torch.Tensor, op: ReduceOp) -> None:
        counts = balanced_split(send.numel(), self.size)
        mine = torch.empty(counts[self.rank], dtype=send.dtype, device="cpu")
        self._reduce_parts(send, mine, counts, op)
        self._gather(mine, recv, counts)

    def _copy_from(self, tensor: torch.Tensor, root: int) -> None:
        if self._gloo is None or tensor.numel() == 0:
            return
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        self._gloo.broadcast([tensor.view(torch.uint8)], options).wait(_FOREVER)

    # - The rest

    def split(self, color: int | None, key: int = 0) -> GlooCommunicator | None:
        wish = torch.tensor([color is not None, color or 0, key], dtype=torch.int64, device="cpu")
        wishes = torch.empty(3 * self.size, dtype=torch.int64, device="cpu")
        self.run(all_gather(wish, wishes))
        number = next(self._splits)
        if color is None:
            return None
        rows = wishes.view(-1, 3).tolist()
        members = sorted((row[2], rank) for rank, row in enumerate(rows) if row[0] and row[1] == color)
        ranks = [rank for _, rank in members]
        name = f"{self.name}/{number}.{color}"
        return GlooCommunicator(self._meeting, ranks.index(self.rank), len(ranks), name=name)

    def post(self, peer: int, payload: bytes) -> Work:
        check_rank("post", "peer", peer, self.size)
        self._check_usable()
        operation = GlooWork("post", "", len(payload), f"rank {self.rank} of {self.size}")
        try:
            self._mailbox.post(peer, payload)
        except RuntimeError as error:
            raise TransportError(
                f"a letter to rank {peer} could not be written to torch.distributed's store, which is out of reach: {error}"
            ) from error
        operation.finish()
        return operation

    def receive_post(self, timeout: float | None) -> tuple[int, bytes] | None:
        limit = check_timeout("receive_post", timeout)
        self._check_usable()
        return self._mailbox.receive(limit)

    def pending(self) -> list[Work]:
        return list(self._line.unfinished)

    def abort(self, code: int) -> None:
        os._exit(code)  # torchrun ends the other ranks

    def abandon(self) -> None:
        if self._gloo is not None and not self._origin.elsewhere:
            tear_down(self._gloo)

    def close(self) -> None:
        if self._closed or self._origin.elsewhere:
            return
        self._closed = True
        self._line.close()
        self._gloo = None
        self._end()
