"""The one interface through which strategies move tensors between ranks.

`overlap.transport.native.NativeCommunicator` has them over comm_core: its own TCP connections, MPI, or one rank alone.
What it carries out are values: `overlap.transport.operation`.

Operations of one communicator happen in the order in which they were issued, which therefore has to be the same on all
of its ranks. Tensors are contiguous and on the CPU; a tensor handed to an operation stays untouched by the caller, and
is kept alive by the `Work`, until the operation is done.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch.autograd import profiler

from comm_core import ReduceOp, Unsupported
from overlap.transport.cuda.streams import Streams
from overlap.transport.operation import Collective, Operation
from overlap.transport.stamps import Stamps
from overlap.transport.work import Line, ProfiledWork, Work

#: Issues one more operation with the arguments it was made for.
Start = Callable[[], Work]

#: What is pending now and then and is no operation among all ranks.
UNCOUNTED = ("post", "part", "send", "recv", "close", "connect")


class Communicator(ABC):
    """Operations on torch tensors between the ranks of one group."""

    #: Hears of every operation of every communicator as it is issued, and returns the work its caller gets.
    #: None unless a timeline is being recorded.
    listener: ClassVar[Callable[[Communicator, Work], Work] | None] = None

    #: This process's number in the group, and how many ranks that has.
    rank: int
    size: int

    @property
    def shard_rank(self) -> int:
        """This rank's shard in reduce-scatters and all-gathers: `rank`, but of a communicator that :meth:`hybrid` made."""
        return self.rank

    @property
    def shard_size(self) -> int:
        """The number of shards, which counts have entries for: `size`, but of a communicator that :meth:`hybrid` made."""
        return self.size

    #: What moves the bytes: "local", "mpi", "tcp" or "gloo".
    backend: str

    #: For messages; the same on all ranks of the group.
    name: str

    #: Whether operations take `wide`: see `overlap.transport.operation.Wide`.
    rounds: ClassVar[bool] = True

    #: Whether the host waits where a result is to `arrive()`; else a stream of a device does, and the host goes on.
    host_waits: bool = True

    #: Where the tensors lie that it is there for.
    place: torch.device = torch.device("cpu")

    #: On which a device computes these tensors; None where the host does.
    streams: Streams | None = None

    #: How many operations this rank has issued.
    issued: int = 0

    #: How many it has promised to issue, all told, where a thread issues them later than they were asked for.
    promised: int = 0

    def _issued(self, work: Work) -> Work:
        """Every implementation passes here what it issued."""
        self.issued += 1
        if profiler._is_profiler_enabled:
            work = ProfiledWork(work)
        return work if Communicator.listener is None else Communicator.listener(self, work)

    @property
    def committed(self) -> int:
        """The number of operations that this rank will have issued if nobody asks for more."""
        return max(self.issued, self.promised)

    def stamps(self) -> Stamps:
        """What tells when its operations, and computations on the tensors that it is there for, take place."""
        return Stamps()

    # - Operations

    @abstractmethod
    def prepare(self, operation: Operation) -> Start:
        """Check `operation` now; each call of what this returns issues it once more.

        The tensors' memory has to stay where it is (MPI 4.0, persistent collective operations).
        """

    def place_of(self, operation: Operation) -> tuple[int, int]:
        """The number of this rank in `operation`, and how many there are: of shards, where it has shards."""
        sharded = operation.kind in (Collective.REDUCE_SCATTER, Collective.ALL_GATHER)
        return (self.shard_rank, self.shard_size) if sharded else (self.rank, self.size)

    def start(self, operation: Operation) -> Work:
        """Issue `operation`."""
        return self.prepare(operation)()

    def run(self, operation: Operation) -> None:
        """Issue `operation`, and wait for it."""
        self.start(operation).wait()

    @abstractmethod
    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """A communicator of the ranks with the same `color`, ordered by `key`, then rank. Every rank calls it.

        None as colour takes part in the call and gets None.
        """

    def two_level(self, groups: Sequence[Sequence[int]]) -> Communicator:
        """A communicator of the same ranks that sends between groups, such as hosts, no more than one rank of each would.

        `groups` hold each rank once and have one size, as ``[[0, 1], [2, 3]]``. On every rank, with the same groups.
        Operations mean what they mean here, shards included. Reduce-scatters, all-gathers and all-reduces go in two
        steps: contributions are reduced within a group, in the order of its members, then in the order of groups or
        along a ring of them. fp16 and bf16 are rounded after each step; an average is that of the groups' averages.

        Raises ``InvalidUsage``, with the same message on all ranks, for groups that differ between ranks, of several
        sizes, or without some rank; ``Unsupported`` over gloo and NCCL.
        """
        raise Unsupported(f"two_level: {_no_groups(self)}")

    def hybrid(self, groups: Sequence[Sequence[int]]) -> Communicator:
        """A communicator of the same ranks in which shards are those of a group's members (HSDP, hybrid sharding).

        `groups`, and what is raised, are as in :meth:`two_level`. Member i of every group has shard i of `shard_size`.

        reduce_scatter   reduces over all ranks: shards have the same bits in every group, an average divides by `size`
        all_gather       takes place within each group
        all others       are over all ranks; an all-reduce goes in two steps

        Counts of the first two have `shard_size` entries. So objects, which are gathered from all ranks, take another
        communicator.
        """
        raise Unsupported(f"hybrid: {_no_groups(self)}")

    # - Mailbox: messages beside the collectives, at any time, with no matching call

    @abstractmethod
    def post(self, peer: int, payload: bytes) -> Work:
        """Send `payload` to `peer`'s mailbox (which may be one's own)."""

    @abstractmethod
    def receive_post(self, timeout: float | None) -> tuple[int, bytes] | None:
        """The next message and the rank that posted it; None when none came within `timeout` seconds.

        `timeout` is as in :meth:`overlap.transport.work.Work.wait`.
        """

    # - Life

    @abstractmethod
    def pending(self) -> list[Work]:
        """Operations issued and not finished, oldest first."""

    def lines(self) -> dict[str, Line]:
        """This rank's :class:`.Line`, by the communicator's name; none where the rank is alone."""
        if self.size == 1:
            return {}
        # A list first: a tuple that grows while another thread asks the garbage collector for all objects is an error.
        kinds = tuple([work.op for work in self.pending() if work.op not in UNCOUNTED])
        return {self.name: Line(self.issued, kinds)}

    @abstractmethod
    def abort(self, code: int) -> None:
        """End the whole job at once with this exit status; does not return."""

    @abstractmethod
    def abandon(self) -> None:
        """End operations with an error that other ranks never issue.

        On every rank; only :meth:`close` may follow.
        """

    @abstractmethod
    def close(self) -> None:
        """Wait for what was issued and let go of the connections. Calling it again does nothing."""


def _no_groups(comm: Communicator) -> str:
    return (
        f"communicator {comm.name} for tensors on {comm.place.type} over {comm.backend} has no groups of ranks; "
        "comm_core's own over TCP or MPI, for tensors of the host, have"
    )


__all__ = ["UNCOUNTED", "Communicator", "ReduceOp", "Start", "Work"]
