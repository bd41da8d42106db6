# mypy: disable-error-code="override,assignment,misc,call-arg,arg-type"
"""A process group of torch.distributed whose tensors on the CPU travel over a communicator of ours."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from comm_core import Error, InvalidUsage, TransportError, Unsupported
from dear.backend.any_source import AnyReceive, AnySource
from dear.backend.collectives import Collectives
from dear.backend.completion import Completer
from dear.backend.memory import Finish, flat, landing
from dear.backend.monitored import monitored_barrier
from dear.backend.watch import Watch
from dear.backend.works import GroupWork, as_one
from overlap.transport.forks import Origin
from overlap.transport.native import NativeCommunicator
from overlap.transport.operation import Operation
from overlap.transport.torch.groups import made_by_members

__all__ = ["Group", "Place"]

_TURN_SECONDS = 0.005  # for a message, which may be far behind others that end before it
_CPU = torch.device("cpu")


class Place:
    """Where a group is: its store, its ranks by their numbers in the default group, and its name there."""

    def __init__(self, store: Any, ranks: Sequence[int], name: str) -> None:
        self.store, self.ranks, self.name = store, tuple(ranks), name


class Group(Collectives, dist.ProcessGroup):
    """The ranks of `comm`. Collectives run in the order of their calls; messages, beside them.

    Args:
        seconds: for each operation, after which the group ends with an error on all ranks.
        watch: what tells other ranks, and watches for stalls; None for a rank that is alone.
        make: gives the group of some of the ranks, by their numbers here, with a store, a name and seconds.
    """

    def __init__(
        self,
        comm: NativeCommunicator,
        place: Place,
        seconds: float,
        watch: Watch | None,
        make: Callable[[Group, Sequence[int], Any, str, float], Group],
    ) -> None:
        super().__init__(comm.rank, comm.size)
        self._comm, self._place, self._seconds, self._watch, self._make = comm, place, seconds, watch, make
        self._name, self._description = place.name, ""
        self._origin = Origin()
        self._lock = threading.Lock()  # of the next three
        self.ended = ""
        self._closed = False
        self._completers: dict[tuple[bool, int], Completer] = {}  # by messages, and how deep callbacks of futures wait
        self._coalesced: list[dist.Work] | None = None
        self._splits, self._monitored = itertools.count(), itertools.count()
        self._others: dict[str, Any] = {}  # groups of the same ranks for other devices
        self._any_source = AnySource(comm.rank, comm.size, self._tell)
        if watch is not None:
            watch.add(self)

    # - What torch asks a group about itself

    def getBackendName(self) -> str:
        return "dear"

    name = _get_backend_name = getBackendName

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._name

    @property
    def group_desc(self) -> str:
        return self._description

    def getGroupName(self) -> str:
        return self._name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupName(self, name: str) -> None:
        self._name = name

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    @property
    def label(self) -> str:
        """Of operations, in reports of stalls and in errors."""
        return f"group {self._name}" + (f" ({self._description})" if self._description not in ("", "undefined") else "")

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc  # type: ignore[assignment]

    def get_group_store(self) -> Any:
        return self._place.store

    @property
    def _device_types(self) -> list[torch.device]:
        return [_CPU, *(torch.device(kind) for kind in self._backends_of_others())]

    def _get_backend(self, device: Any) -> Any:
        kind = torch.device(device).type
        return self if kind == "cpu" else self._other(kind)._get_backend(torch.device(kind))

    supports_splitting = supports_coalescing = supports_time_estimate = supports_shrinking = False

    def supports_tensor_alloc(self, _device: Any) -> bool:
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        """For operations that are issued from now on."""
        self._seconds = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        """It begins at 0 by itself."""

    def _get_sequence_number_for_group(self) -> int:
        return self._comm.issued

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def comm(self) -> NativeCommunicator:
        return self._comm

    @property
    def ranks(self) -> tuple[int, ...]:
        """By their numbers in the default group."""
        return self._place.ranks

    # - Tensors of other devices: "cpu:dear,cuda:nccl"

    def _backends_of_others(self) -> dict[str, str]:
        world = dist.distributed_c10d._world
        config = dist.distributed_c10d.BackendConfig(world.pg_backend_config.get(self, "cpu:dear"))
        return {kind: str(name) for kind, name in config.get_device_backend_map().items() if str(name) != "dear"}

    def _other(self, kind: str) -> Any:
        """The group of these ranks for a `kind` of device, made when it is first asked for. On every rank of this one."""
        if kind not in self._others:
            names = self._backends_of_others()
            if kind not in names:
                raise InvalidUsage(
                    f'{self.label} is over "dear", which moves tensors of the CPU, and got one on {kind}: '
                    f'init_process_group("cpu:dear,{kind}:NAME") names a backend for those, as "cpu:dear,cuda:nccl"'
                )
            limit = timedelta(seconds=self._seconds)
            name = f"{self._comm.name}/{kind}"  # which all ranks know alike
            self._others[kind] = made_by_members(self.ranks, names[kind], self._place.store, name, limit)
        return self._others[kind]

    def elsewhere(self, tensors: Any) -> Any:
        """The group that moves `tensors`, of which the first is looked at; None: this one."""
        while isinstance(tensors, (list, tuple)):
            if not tensors:
                return None
            tensors = tensors[0]
        kind = tensors.device.type
        return None if kind == "cpu" else self._other(kind)

    # - Issuing

    def issue(self, operation: Operation, outputs: Sequence[Any], limit: Any = None, finish: Finish = None) -> Any:
        self._require_open()
        return self._work(self._comm.start(operation), outputs, limit, finish)

    def _work(self, work: Any, outputs: Sequence[Any], limit: Any = None, finish: Finish = None) -> Any:
        made = GroupWork(self, work, outputs, self._seconds_of(limit), finish)
        if self._coalesced is not None:
            self._coalesced.append(made)
        return made

    def _seconds_of(self, limit: Any) -> float:
        given = limit if isinstance(limit, timedelta) else getattr(limit, "timeout", None)
        return given.total_seconds() if given is not None and given > timedelta(0) else self._seconds

    def _require_open(self) -> None:
        if self._closed:
            raise InvalidUsage(f"{self.label} was destroyed")

    def completer(self, messages: bool) -> Completer:
        """What completes the next future. One that a callback waits for is another thread's than the callback itself."""
        with self._lock:
            depths = [depth for (_, depth), one in self._completers.items() if one.is_current()]
            key = messages, 1 + max(depths, default=-1)
            if key not in self._completers:
                self._completers[key] = Completer(self._name, _TURN_SECONDS if messages else None)
            return self._completers[key]

    def _start_coalescing(self, device: Any) -> None:
        if torch.device(device).type != "cpu":
            self._other(torch.device(device).type)._start_coalescing(device)
            return
        self._coalesced = []

    def _end_coalescing(self, device: Any) -> Any:
        if torch.device(device).type != "cpu":
            return self._other(torch.device(device).type)._end_coalescing(device)
        works, self._coalesced = self._coalesced or [], None
        return as_one(works)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier that tells which ranks have not come within `timeout`: ``TransportError``, on every rank.

        Through the store. With `wait_all_ranks` rank 0 waits for all of them before it says so.
        """
        seconds = self._seconds if timeout is None else timeout.total_seconds()
        store = PrefixStore(f"dear/monitored/{next(self._monitored)}", self._place.store)
        monitored_barrier(store, self._comm.rank, self._comm.size, seconds, self.label, wait_all_ranks)

    # - Messages

    def send(self, tensors: Any, dstRank: int, tag: int) -> Any:  # torch's names
        if (other := self.elsewhere(tensors)) is not None:
            return other.send(tensors, dstRank, tag)
        self._require_open()
        (tensor,) = tensors
        work = self._comm.send(flat(tensor), dstRank, tag, label=self.label)
        self._any_source.sends(dstRank, tag)
        return self._work(work, [])

    def recv(self, tensors: Any, srcRank: int, tag: int) -> Any:  # torch's names
        if (other := self.elsewhere(tensors)) is not None:
            return other.recv(tensors, srcRank, tag)
        self._require_open()
        (tensor,) = tensors
        memory, finish = landing(tensor)
        work = self._comm.receive(memory, srcRank, tag, label=self.label)
        self._any_source.receives(srcRank, tag)
        return self._work(work, [tensor], finish=finish)

    def recv_anysource(self, tensors: Any, tag: int) -> Any:
        """From whichever other rank sends first. The work has its rank then: ``source_rank()``."""
        if (other := self.elsewhere(tensors)) is not None:
            return other.recv_anysource(tensors, tag)
        self._require_open()
        if self._watch is None:
            raise Unsupported(
                "recv() from any rank goes with a default group over 'dear' of several ranks: name the sender, as src="
            )
        (tensor,) = tensors
        memory, finish = landing(tensor)
        one = AnyReceive(self.label, tag, lambda peer: self._comm.receive(memory, peer, tag, label=self.label))
        self._any_source.receive(one, tag)
        return self._work(one, [tensor], finish=finish)

    # - Life

    def split_group(
        self,
        new_ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> Group | None:
        """The group of these ranks of this one, with a communicator of its own; None on others. On every rank of it."""
        name = group_name or f"{self._name}:split:{next(self._splits)}"
        if self.rank() not in new_ranks:
            return None
        seconds = self._seconds if timeout is None else timeout.total_seconds()
        store = PrefixStore(name, self._place.store)
        made = self._make(self, sorted(new_ranks), store, name, seconds)
        made.setGroupDesc(group_desc or f"{self._description}:split")
        return made

    def end(self, reason: str) -> None:
        if not self._end_here(reason):
            return
        if self._watch is not None:
            self._watch.tell_end(self, reason)

    def _end_here(self, reason: str) -> bool:
        with self._lock:
            if self.ended or self._closed or self._origin.elsewhere:
                return False
            self.ended = reason
        self._comm.abandon()
        self._any_source.end(TransportError(f"{self.label} has ended: {reason}"))
        return True

    def _tell(self, peer: int, letter: Any) -> None:
        """Of messages, to rank `peer` of the group."""
        assert self._watch is not None, "recv_anysource() has it"
        self._watch.tell_of_message(self, peer, letter)

    def hear_end(self, reason: str) -> None:
        """Another rank has ended the group."""
        self._end_here(reason)

    def hear_of_message(self, sender: int, letter: Any) -> None:
        """A letter of another rank, by its number in the default group, about messages."""
        self._any_source.hear(self.ranks.index(sender), letter)

    def abort(self) -> None:
        """End what is under way with an error, here and on the other ranks. The group carries nothing more."""
        self.end(f"rank {self.rank()} has aborted {self.label}")
        self.close(0.0)

    def shutdown(self) -> None:
        """Wait for what was issued, then let go of the connections. Calling it again does nothing."""
        self.close(self._seconds)

    def close(self, seconds: float) -> None:
        """:meth:`shutdown`; what is not over after that many `seconds` is given up."""
        if self._origin.elsewhere:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._any_source.end(InvalidUsage(f"{self.label} was destroyed"))
        if self._watch is not None:
            if not self.ended:
                self._any_source.leave()
            self._watch.leaving(self)
        try:
            for work in self._comm.pending():
                work.wait(0.0 if work.op == "recv" else seconds)
        except Error:  # whoever waits for it is told
            self._comm.abandon()
        self._comm.close()
        for completer in self._completers.values():
            completer.close()
        if self._watch is not None:
            self._watch.left(self)
