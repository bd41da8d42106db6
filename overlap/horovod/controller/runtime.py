"""Carries out collectives by name: a thread of each rank follows the order that rank 0 decides.

Whatever a rank asks for goes as a letter to rank 0, whose thread keeps the `Coordinator`; its responses come back as
letters, in one order for all, and each rank's thread issues the collectives. Both letters and collectives travel on a
communicator of their own, so that strategies, whose order is agreed beforehand, are neither held up nor overtaken. The
thread sleeps in a receive; in a world of one there is none and everything happens on the caller's thread.

[Note: join and those who reduce on their own] ``join()`` answers for this rank whatever the others reduce by name. Who
reduces without names (a distributed optimizer) appends an object with ``join() -> None`` to ``Session.participants``:
``join()`` calls it on the caller's thread, after the others were told that this rank has joined, and it returns
when no rank needs this one's part in its reductions any more. With several of them, each is called in the order in which
they were appended, the same on all ranks.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from overlap.features.join import joined_ranks_of
from overlap.horovod.controller.coordinator import Coordinator, Decision, Stalled
from overlap.horovod.controller.errors import HorovodInternalError, Mismatch
from overlap.horovod.controller.operation import Group, Handles, Nothing, Operation, Pending
from overlap.horovod.controller.request import GiveUp, Kind, Leave, Request, Response
from overlap.job.process_set import ProcessSet, global_process_set
from overlap.job.session import Session
from overlap.transport.communicator import Communicator
from overlap.transport.encoding import NotData, decode, encode
from overlap.transport.work import Line

__all__ = ["Runtime"]

log = logging.getLogger("dear")

_WAIT_SECONDS = 3600.0
_SHUT_DOWN, _END = "has shut down", "end"
_Key = tuple[int, Kind, str]


class Runtime:
    """The part of a session that serves collectives by name. Made on every rank at the same time.

    `stand_in` is what a rank that has joined does in an operation of the others.
    """

    def __init__(self, session: Session, stand_in: Callable[[Response], Operation]) -> None:
        self._session, self._stand_in = session, stand_in
        self._comm = session.channels.named("names")
        self.rank, self.size = self._comm.rank, self._comm.size
        everybody = tuple(range(self.size))
        self._groups: dict[int, Group] = {0: Group(0, everybody, self._comm)}
        self._registered: dict[int, ProcessSet] = {0: global_process_set}
        global_process_set._register(0, everybody, self.rank)
        self._coordinator = Coordinator(self.size) if self.rank == 0 else None
        self._open: dict[_Key, Pending] = {}
        self.handles = Handles()
        self.failed_join: Pending | None = None  # while this rank should call join() again
        self._names: dict[tuple[int, Kind], Any] = defaultdict(lambda: itertools.count(1))
        self._asked = 0
        self._threads: set[int] = set()
        self._lock = threading.RLock()  # what is open, and the coordinator's table
        self._closed_by: Exception | None = None
        self._ended = self._gone = False
        session.watchdog.watch_names(self)
        self._thread: threading.Thread | None = None
        if self.size > 1:
            self._thread = threading.Thread(target=self._run, name="dear-names", daemon=True)
            self._thread.start()

    # - Callers' threads

    def group(self, process_set: ProcessSet) -> Group:
        """The process set as this rank sees it.

        Raises ``ValueError`` unless it is registered and this rank is in it.
        """
        if not isinstance(process_set, ProcessSet):
            raise TypeError(f"process_set should be a ProcessSet and is {type(process_set).__name__}")
        number = process_set.process_set_id
        if number is None or number not in self._groups:
            raise ValueError(
                f"{process_set} is not registered: pass it to init(process_sets=…) or to add_process_set()"
            )
        group = self._groups[number]
        if self.rank not in group.ranks:
            raise ValueError(f"rank {self.rank} is not in the process set with ranks {list(group.ranks)}")
        return group

    def name(self, kind: Kind, group: Group, given: str | None) -> str:
        """The given name, or the next number: unnamed operations of a kind match in the order of their calls."""
        return given if given is not None else f"noname.{next(self._names[group.number, kind])}"

    def submit(self, request: Request, operation: Operation) -> Pending:
        """Ask for an operation. Raises ``ValueError`` while another one of the same kind and name is under way."""
        if request.kind is not Kind.JOIN:
            joined_ranks_of(self._session).check()
        if self._session.late:
            raise HorovodInternalError(
                f"{request.title}: rank {self.rank} has come back to ranks that are inside the function of keep_going, and "
                "would wait for them: between init() and that function, call nothing that all ranks take part in"
            )
        pending = Pending(request, operation)
        key = _key(request)
        refused = self._open.get(key)
        if refused is not None and refused.request.refusal:
            refused.settled()  # the others have yet to hear of it; only then the name means something new
        with self._lock:
            if self._closed_by is not None:
                raise HorovodInternalError(f"{request.title}: {self._closed_by}")
            if key in self._open:
                raise ValueError(
                    f"{request.title} is under way already on rank {self.rank}: wait for it, or use another name"
                )
            self._open[key] = pending
            self._asked += 1
            self._threads.add(threading.get_ident())
        self._tell(0, request)
        return pending

    def refuse(self, request: Request) -> None:
        """Tell the others that this rank cannot take part; nothing happens where the name is in use."""
        with self._lock:
            if self._closed_by is not None or _key(request) in self._open:
                return
        self.submit(request, Nothing())

    def remember(self, number: int, process_set: ProcessSet) -> None:
        """Remember `process_set` under this number, until it is removed or the session ends."""
        self._registered[number] = process_set
        process_set._register(number, self._groups[number].ranks, self.rank)

    def registered(self, ranks: Sequence[int]) -> ProcessSet | None:
        """The process set with these `ranks` in ascending order, where there is one."""
        return next((each for each in self._registered.values() if each.ranks == list(ranks)), None)

    def forget(self, number: int) -> None:
        """Forget the process set with this number."""
        found = self._registered.pop(number, None)
        if found is not None:
            found._invalidate()

    # - What the watchdog asks

    def pending(self) -> list[Any]:
        """The operations that this rank has asked for and that are undecided, without join(), in which nobody is late.

        What is decided shows as operations of a communicator; those of process sets are listed here.
        """
        with self._lock:
            running = [work for comm in self._set_communicators() for work in comm.pending()]
            if self._coordinator is None:
                return [*(open_ for open_ in self._open.values() if open_.request.kind is not Kind.JOIN), *running]
            return [*self._stalled(mine=True), *running]

    def asked_by_others(self) -> list[Stalled]:
        """The operations that are undecided because this rank, and perhaps others, have not asked for them.

        Known to rank 0 alone.
        """
        with self._lock:
            return self._stalled(mine=False)

    def _stalled(self, mine: bool) -> list[Stalled]:
        missing = [] if self._coordinator is None else self._coordinator.missing()
        late = [(waiting, absent) for waiting, absent in missing if waiting.kind is not Kind.JOIN]
        return [Stalled(waiting, absent) for waiting, absent in late if (self.rank in waiting.requests) is mine]

    def lines(self) -> dict[str, Line]:
        """How far this rank has come on the communicators of process sets."""
        with self._lock:
            comms = self._set_communicators()
            return {name: line for comm in comms for name, line in comm.lines().items()}

    def _set_communicators(self) -> list[Communicator]:
        return [group.comm for number, group in self._groups.items() if number and group.comm is not None]

    @property
    def asked(self) -> int:
        """The number of operations that this rank has asked for so far."""
        return self._asked

    @property
    def undecided(self) -> int:
        """The number of operations that this rank has asked for and some other rank has not."""
        return len(self._open)

    @property
    def threads(self) -> Collection[int]:
        """The threads that ever asked for an operation here, by identifier."""
        return frozenset(self._threads)

    def waits_for_a_decision(self, thread: int) -> bool:
        """Whether `thread` waits for one of the open operations, and so would be told if that failed."""
        with self._lock:
            return any(pending.waiter == thread for pending in self._open.values())

    def give_up(self, reason: str) -> None:
        """Fail whatever is undecided, on every rank, with `reason`. On rank 0."""
        self._tell(0, GiveUp(reason))

    def close(self) -> None:
        """Take part in what others still ask for, and in nothing new, until all ranks have come here."""
        with self._lock:
            if self._closed_by is None:
                self._closed_by = HorovodInternalError("the session was shut down")
        if self._thread is not None:
            self._leave(_SHUT_DOWN)
            self._thread.join()
        self._fail_open(HorovodInternalError("the session was shut down before every rank had asked for it"))
        for number in list(self._registered):
            self.forget(number)
        for number in [number for number in self._groups if number]:
            self._drop(number)

    def interrupt(self) -> None:
        """Fail whatever is under way, since ranks are lost."""
        with self._lock:
            self._closed_by = HorovodInternalError("ranks are lost")
            comms = self._set_communicators()
        self._ended = True
        for comm in comms:
            comm.abandon()
        if self._thread is not None:
            self._tell(self.rank, _END)  # wakes it
        self._fail_open(self._closed_by)

    def abandon(self) -> None:
        """End the runtime after :meth:`interrupt`."""
        if self._thread is not None:
            self._thread.join()
        for number in list(self._registered):
            self.forget(number)
        for number in [number for number in self._groups if number]:
            self._drop(number)

    # - The runtime's thread (or, in a world of one, the caller's)

    def _tell(self, rank: int, message: Any) -> None:
        if self.size == 1:
            self._take(0, message)
        else:
            self._comm.post(rank, encode(message))

    def _run(self) -> None:
        try:
            while not self._ended:
                letter = self._comm.receive_post(_WAIT_SECONDS)
                if letter is None:
                    continue
                sender, payload = letter
                try:
                    message = decode(payload)
                except NotData as error:  # of none of the ranks
                    log.warning("rank %d: a letter about collectives by name is passed over: %s", self.rank, error)
                    continue
                self._take(sender, message)
        except Exception as error:  # no letters any more: whoever waits for an answer is told
            log.warning("rank %d: collectives by name stopped: %s", self.rank, error)
            with self._lock:
                self._closed_by = HorovodInternalError(f"the connection to the other ranks was lost: {error}")
            self._fail_open(self._closed_by)

    def _take(self, sender: int, message: Any) -> None:
        if isinstance(message, Response):
            self._carry_out(message)
        elif message == _END:
            self._ended = True
        else:
            self._coordinate(sender, message)

    def _coordinate(self, sender: int, message: Any) -> None:
        assert self._coordinator is not None, "requests go to rank 0"
        with self._lock:
            table = self._coordinator
            if isinstance(message, GiveUp):
                decided = table.give_up(message.reason)
            else:
                leaves = isinstance(message, Leave)
                decided = table.leave(sender, message.why) if leaves else table.submit(sender, message)
        self._publish(decided)
        if isinstance(message, Leave) and self._coordinator.everybody_left:
            for rank in range(1, self.size):
                self._tell(rank, _END)
            self._ended = True

    def _publish(self, decided: Iterable[Decision]) -> None:
        for ranks, response in decided:
            for rank in ranks:
                if rank != self.rank:
                    self._tell(rank, response)
            if self.rank in ranks:
                self._carry_out(response)

    def _carry_out(self, response: Response) -> None:
        with self._lock:
            pending = self._open.pop(_key(response.request), None)
        if response.error:
            if pending is not None:
                pending.fail((Mismatch if response.mismatch else HorovodInternalError)(response.error))
            return
        try:
            if response.request.kind is Kind.JOIN:
                self._names.clear()  # the others may have used more of them meanwhile
            self._change_groups(response)
            operation = self._stand_in(response) if pending is None else pending.operation
            works = operation.start(response, self._groups[response.request.process_set])
            if pending is not None:
                pending.issued(works)
        except Exception as error:  # of this rank alone, such as no memory: it is one operation behind the others now
            text = f"{response.request.title} could not be started on rank {self.rank}: {error}"
            log.error("%s", text)
            if pending is not None:
                pending.fail(error)
            self._fall_out(text)

    def _fall_out(self, text: str) -> None:
        """Take part in nothing more. Whoever waits in what this rank does not issue is ended by the watchdog."""
        with self._lock:
            self._closed_by = HorovodInternalError(text)
        self._fail_open(self._closed_by)
        self._leave(f"has failed ({text})")
        self._session.watchdog.leaving()

    def _leave(self, why: str) -> None:
        """Once; who fell out has left already."""
        if not self._gone:
            self._gone = True
            self._tell(0, Leave(why))

    def _change_groups(self, response: Response) -> None:
        request, number = response.request, response.number
        if request.kind is Kind.ADD_PROCESS_SET:
            comm = self._comm.split(0 if self.rank in request.ranks else None, self.rank)
            self._groups[number] = Group(number, request.ranks, comm)
        elif request.kind is Kind.REMOVE_PROCESS_SET:
            self._drop(number)

    def _drop(self, number: int) -> None:
        with self._lock:  # nobody asks a closed communicator what is pending
            comm = self._groups.pop(number).comm
        if comm is not None:
            comm.close()

    def _fail_open(self, error: Exception) -> None:
        with self._lock:
            left = list(self._open.values())
            self._open.clear()
        for pending in left:
            pending.fail(HorovodInternalError(f"{pending.request.title}: {error}"))


def _key(request: Request) -> _Key:
    return request.process_set, request.kind, request.name
