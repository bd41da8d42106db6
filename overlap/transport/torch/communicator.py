"""The communicator of a job that torchrun started: rings over torch.distributed's messages, without MPI."""

from __future__ import annotations

import datetime
import itertools
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

import comm_core
from comm_core import ReduceOp, TransportError
from overlap.transport.checks import check_average, check_rank, check_timeout
from overlap.transport.communicator import Communicator, Start, Wide, Work
from overlap.transport.forks import Origin
from overlap.transport.requests import (
    Exchange,
    all_gather_request,
    all_reduce_request,
    all_to_all_request,
    broadcast_request,
    check_wide,
    reduce_request,
    reduce_scatter_request,
)
from overlap.transport.torch.gloo import Link
from overlap.transport.torch.mailbox import OwnMailbox, StoreMailbox
from overlap.transport.torch.meaning import Inquiry, Meaning, meaning_of
from overlap.transport.torch.rendezvous import Rendezvous, connecting, corner_of, join_world, name_interface
from overlap.transport.torch.routes import Routes
from overlap.transport.torch.stages import Local, Stage, StagedTask
from overlap.transport.torch.variables import Variables
from overlap.transport.torch.worker_thread import PendingWork, WorkerThread

__all__ = ["ProcessGroupCommunicator", "connect", "connect_generation"]

_sessions: defaultdict[tuple[int, ...] | None, Iterator[int]] = defaultdict(itertools.count)  # by ranks; None: all


def connect(
    group: dist.ProcessGroup | None = None, awaited: Callable[[Sequence[int]], object] = bool
) -> ProcessGroupCommunicator:
    """Connect all ranks of torch.distributed's world, or those in `group`. On every rank of it.

    Joins torchrun's world first where the script did not; `awaited` hears now and then of the ranks that have not come.
    """
    ranks = None if group is None else tuple(dist.get_process_group_ranks(group))
    session = next(_sessions[ranks])
    created = not dist.is_initialized()
    named = join_world(session, awaited) if created else None
    meeting = Rendezvous(dist.distributed_c10d._get_default_store(), corner_of(session, ranks))
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if named is None:
        named = name_interface(meeting.connect("interfaces"), rank, size)
    if os.environ.get("DEAR_TRANSPORT") != "gloo" and size > 1:
        from overlap.transport.tcp import TcpCommunicator, connect_tcp
        from overlap.transport.torch.interfaces import VARIABLE, own_addresses

        chosen = os.environ.get(VARIABLE, "")
        host = next((address.text for address in own_addresses() if address.interface == chosen), "127.0.0.1")

        def end() -> None:
            if created and dist.is_initialized():
                dist.destroy_process_group()
            named.restore()

        return TcpCommunicator(connect_tcp(meeting.connect("tcp"), rank, size, host, meeting.patience), end)
    return ProcessGroupCommunicator(meeting, rank, size, owns_world=created, named=named)


def connect_generation(
    store: Any, number: int, rank: int, size: int, patience: datetime.timedelta
) -> ProcessGroupCommunicator:
    """Connect generation `number` of a job whose ranks come and go, as `rank` of `size`. On every rank of it.

    `store` outlives them; ranks may take `patience` to connect. torch.distributed is left alone.
    """
    meeting = Rendezvous(store, f"dear/generation-{number}", patience, attempts=True)
    try:
        named = name_interface(meeting.connect("interfaces"), rank, size)
    except RuntimeError as error:  # a rank was lost before it had said where it is
        raise TransportError(f"generation {number}: {error}") from error
    try:
        return ProcessGroupCommunicator(meeting, rank, size, named=named)
    except TransportError:
        named.restore()
        raise


class ProcessGroupCommunicator(Communicator):
    """Collectives over gloo contexts of our own; their ranks find each other at `meeting`."""

    def __init__(
        self,
        meeting: Rendezvous,
        rank: int,
        size: int,
        *,
        name: str = "world",
        owns_world: bool = False,
        named: Variables | None = None,
    ) -> None:
        self._rank, self._size, self._name = rank, size, name
        self._meeting = meeting
        self._store = meeting.connect(name)  # others may be set up meanwhile, on other threads, which block theirs
        self._owns_world, self._named, self._origin = owns_world, named, Origin()
        self._routes = Routes(rank, size)
        self._link = self._new_link("collectives")
        self._strand = WorkerThread(f"dear-{name}")
        self._mailbox = StoreMailbox(meeting, f"{name}/mail", rank) if size > 1 else OwnMailbox()
        self._numbers, self._splits = itertools.count(), itertools.count()
        self._connecting: list[PendingWork] = []  # parts of this one whose ranks look for each other in the store
        self._inquiry = Inquiry(lambda: meeting.connect(f"{name}/inquiry"), rank, size, self._link.tear_down)
        self._closed = False

    def _new_link(self, purpose: str) -> Link:
        with connecting():
            return Link(PrefixStore(purpose, self._store), self._rank, self._size, self._meeting.patience)

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    @property
    def backend(self) -> str:
        return "gloo"

    @property
    def name(self) -> str:
        return self._name

    def _check_usable(self) -> None:
        self._origin.require()
        if self._closed:
            raise comm_core.InvalidUsage(f"communicator {self._name} is closed")

    # - Collectives: stages, run one after the other by the worker thread

    def _issue(self, meaning: Meaning, label: str, nbytes: int, stages: Callable[[], Sequence[Stage]]) -> Work:
        self._check_usable()
        work = PendingWork(meaning.kind, label, self._rank, self._size, nbytes, self._strand.ask_first)
        task = StagedTask(self._link, next(self._numbers), meaning, self._inquiry, stages)
        return self._issued(self._strand.submit(work, task))

    def _init(
        self,
        meaning: Meaning,
        label: str,
        nbytes: int,
        stages: Callable[[], Sequence[Stage]],
        first: Callable[[], object] | None = None,
    ) -> Start:
        """`first` is done by whoever issues the operation."""

        def start() -> Work:
            if first is not None:
                first()
            return self._issue(meaning, label, nbytes, stages)

        return start

    def reduce_scatter_init(
        self,
        send: torch.Tensor,
        recv: torch.Tensor,
        op: ReduceOp = ReduceOp.SUM,
        *,
        counts: Sequence[int] | None = None,
        wide: Wide | None = None,
        label: str = "",
    ) -> Start:
        check_average("reduce_scatter", op, send)
        request = reduce_scatter_request(self._rank, self._size, send, recv, op, counts)
        stage = self._routes.reduce_scatter(request.send, request.recv, request.send_counts, op)
        first, last = _narrow("reduce_scatter", wide, request)
        meaning = meaning_of("reduce_scatter", request.send, op)
        return self._init(meaning, label, request.send.nbytes, lambda: [stage(), *last], first)

    def all_gather_init(
        self,
        send: torch.Tensor,
        recv: torch.Tensor,
        *,
        counts: Sequence[int] | None = None,
        wide: Wide | None = None,
        label: str = "",
    ) -> Start:
        request = all_gather_request(self._rank, self._size, send, recv, counts)
        stage = self._routes.all_gather(request.send, request.recv, request.recv_counts)
        first, last = _narrow("all_gather", wide, request)
        meaning = meaning_of("all_gather", request.recv)
        return self._init(meaning, label, request.recv.nbytes, lambda: [stage(), *last], first)

    def all_reduce_init(
        self, send: torch.Tensor, recv: torch.Tensor, op: ReduceOp = ReduceOp.SUM, *, label: str = ""
    ) -> Start:
        check_average("all_reduce", op, send)
        request = all_reduce_request(send, recv, op)
        meaning = meaning_of("all_reduce", request.send, op)
        return self._init(
            meaning, label, request.recv.nbytes, lambda: self._routes.all_reduce(request.send, request.recv, op)
        )

    def broadcast_async(self, tensor: torch.Tensor, root: int = 0, *, label: str = "") -> Work:
        flat = broadcast_request(self._size, tensor, root)
        stage = self._routes.broadcast(flat, root)
        return self._issue(meaning_of("broadcast", flat, root=root), label, flat.nbytes, lambda: [stage()])

    def reduce_async(
        self,
        send: torch.Tensor,
        recv: torch.Tensor | None,
        op: ReduceOp = ReduceOp.SUM,
        root: int = 0,
        *,
        label: str = "",
    ) -> Work:
        check_average("reduce", op, send)
        source, target = reduce_request(self._rank, self._size, send, recv, op, root)
        meaning = meaning_of("reduce", source, op, root)
        return self._issue(meaning, label, source.nbytes, lambda: self._routes.reduce(source, target, op, root))

    def all_to_all_async(
        self,
        send: torch.Tensor,
        recv: torch.Tensor,
        *,
        send_counts: Sequence[int] | None = None,
        recv_counts: Sequence[int] | None = None,
        label: str = "",
    ) -> Work:
        request = all_to_all_request(self._rank, self._size, send, recv, send_counts, recv_counts)
        stage = self._routes.all_to_all(request.send, request.recv, request.send_counts, request.recv_counts)
        meaning = meaning_of("all_to_all", request.send, sized=False)
        return self._issue(meaning, label, request.send.nbytes, lambda: [stage])

    def barrier_async(self, *, label: str = "") -> Work:
        token = torch.zeros(1, dtype=torch.uint8, device="cpu")
        return self._issue(meaning_of("barrier"), label, 0, lambda: self._routes.all_reduce(token, token, ReduceOp.MAX))

    # - The rest

    def split(self, color: int | None, key: int = 0) -> ProcessGroupCommunicator | None:
        wish = torch.tensor([color is not None, color or 0, key], dtype=torch.int64, device="cpu")
        wishes = torch.empty(3 * self._size, dtype=torch.int64, device="cpu")
        self.all_gather(wish, wishes)
        number = next(self._splits)
        if color is None:
            return None
        rows = wishes.view(-1, 3).tolist()
        members = sorted((row[2], rank) for rank, row in enumerate(rows) if row[0] and row[1] == color)
        ranks = [rank for _, rank in members]
        name = f"{self._name}/{number}.{color}"
        work = PendingWork("connect", name, self._rank, self._size, 0)
        self._connecting.append(work)
        try:
            return ProcessGroupCommunicator(self._meeting, ranks.index(self._rank), len(ranks), name=name)
        finally:
            self._connecting.remove(work)
            work.finish()

    def post(self, peer: int, payload: bytes) -> Work:
        check_rank("post", "peer", peer, self._size)
        self._check_usable()
        work = PendingWork("post", "", self._rank, self._size, len(payload))
        try:
            self._mailbox.post(peer, payload)
        except RuntimeError as error:
            raise TransportError(
                f"a letter to rank {peer} could not be written to torch.distributed's store, which is out of reach: {error}"
            ) from error
        work.finish()
        return work

    def receive_post(self, timeout: float | None) -> tuple[int, bytes] | None:
        limit = check_timeout("receive_post", timeout)
        self._check_usable()
        return self._mailbox.receive(limit)

    def pending(self) -> list[Work]:
        return [*self._connecting, *self._strand.pending()]

    def abort(self, code: int) -> None:
        os._exit(code)  # torchrun ends the other ranks

    def abandon(self) -> None:
        if self._origin.elsewhere:
            return
        self._link.tear_down()

    def close(self) -> None:
        if self._closed or self._origin.elsewhere:
            return
        self._closed = True
        self._strand.close()
        self._link.close()
        if self._owns_world and dist.is_initialized():
            dist.destroy_process_group()
        if self._named is not None:
            self._named.restore()


def _narrow(what: str, wide: Wide | None, request: Exchange) -> tuple[Callable[[], object] | None, list[Stage]]:
    """What rounds into what is sent, and what is to be done in the end."""
    if wide is None:
        return None, []
    check_wide(what, wide.send, wide.recv, request.send, request.recv)
    return lambda: request.send.copy_(wide.send), [Local(lambda: wide.recv.copy_(request.recv))]
