"""The one interface through which strategies move tensors between ranks.

`overlap.transport.native.NativeCommunicator` has them over comm_core: its own TCP connections, MPI, or one rank alone.
Every operation has an asynchronous form that returns a `Work`, and a synchronous form that is the same call followed by
`wait()`.

Operations of one communicator happen in the order in which they were issued, which therefore has to be the same on all
of its ranks. Tensors are contiguous and on the CPU; a tensor handed to an operation stays untouched by the caller, and
is kept alive by the `Work`, until the operation is done.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.autograd import profiler

from comm_core import ReduceOp
from overlap.transport.cuda.streams import Streams
from overlap.transport.stamps import HostStamps, Stamps
from overlap.transport.work import Line, ProfiledWork, Work

#: Issues one more operation with the arguments it was made for.
Start = Callable[[], Work]

#: What is pending now and then and is no operation among the ranks.
UNCOUNTED = ("post", "close", "connect")


@dataclass(frozen=True, slots=True)
class Wide:
    """fp32 tensors beside the fp16 or bf16 ones of an operation: flat, on the CPU, of the same sizes, apart in memory.

    `send` is rounded into the operation's `send`, to the nearest value, before it travels, and `recv` gets what its `recv`
    has in the end, by whoever moves the bytes and not by the caller (over gloo, some of it by the caller).
    Rounding does not wait for operations issued before.
    """

    send: torch.Tensor
    recv: torch.Tensor


class Communicator(ABC):
    """Collectives on torch tensors between the ranks of one group."""

    #: Hears of every operation of every communicator as it is issued, and returns the work its caller gets.
    #: None unless a timeline is being recorded.
    listener: ClassVar[Callable[[Communicator, Work], Work] | None] = None

    #: Whether operations take `wide`: see :class:`Wide`.
    rounds: ClassVar[bool] = True

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
        return HostStamps()

    @property
    @abstractmethod
    def rank(self) -> int:
        """This process's number in the group."""

    @property
    @abstractmethod
    def size(self) -> int:
        """How many ranks the group has."""

    @property
    @abstractmethod
    def backend(self) -> str:
        """What moves the bytes: "local", "mpi", "tcp" or "gloo"."""

    @property
    @abstractmethod
    def name(self) -> str:
        """A name for messages; the same on all ranks of the group."""

    # - Collectives

    def reduce_scatter_async(
        self,
        send: torch.Tensor,
        recv: torch.Tensor,
        op: ReduceOp = ReduceOp.SUM,
        *,
        counts: Sequence[int] | None = None,
        wide: Wide | None = None,
        label: str = "",
    ) -> Work:
        """Reduce `send` over all ranks; rank r receives the `counts[r]` elements of its shard. Never writes `send`.

        Without `counts` the split is balanced: the first `send.numel() % size` ranks get one element more. With `wide`,
        `send` is written after all: see :class:`Wide`.
        """
        return self.reduce_scatter_init(send, recv, op, counts=counts, wide=wide, label=label)()

    def all_gather_async(
        self,
        send: torch.Tensor,
        recv: torch.Tensor,
        *,
        counts: Sequence[int] | None = None,
        wide: Wide | None = None,
        label: str = "",
    ) -> Work:
        """Put every rank's `send` side by side into every rank's `recv`.

        `send` may be this rank's own part of `recv`, which then is not copied. Without `counts` the parts are the
        balanced split of `recv.numel()`. With `wide`, `send` is written, too: see :class:`Wide`.
        """
        return self.all_gather_init(send, recv, counts=counts, wide=wide, label=label)()

    def all_reduce_async(
        self, send: torch.Tensor, recv: torch.Tensor, op: ReduceOp = ReduceOp.SUM, *, label: str = ""
    ) -> Work:
        """Reduce `send` over all ranks into every rank's `recv`, which may be `send` itself."""
        return self.all_reduce_init(send, recv, op, label=label)()

    @abstractmethod
    def broadcast_async(self, tensor: torch.Tensor, root: int = 0, *, label: str = "") -> Work:
        """Overwrite `tensor` on every rank with `root`'s."""

    @abstractmethod
    def reduce_async(
        self,
        send: torch.Tensor,
        recv: torch.Tensor | None,
        op: ReduceOp = ReduceOp.SUM,
        root: int = 0,
        *,
        label: str = "",
    ) -> Work:
        """Reduce `send` over all ranks into `root`'s `recv`; the other ranks may pass None for it."""

    @abstractmethod
    def all_to_all_async(
        self,
        send: torch.Tensor,
        recv: torch.Tensor,
        *,
        send_counts: Sequence[int] | None = None,
        recv_counts: Sequence[int] | None = None,
        label: str = "",
    ) -> Work:
        """Send part i of `send` to rank i and receive part j of `recv` from rank j. Without counts: equal parts."""

    @abstractmethod
    def barrier_async(self, *, label: str = "") -> Work:
        """Issue a barrier, which is done once every rank has issued it."""

    @abstractmethod
    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """A communicator of the ranks with the same `color`, ordered by `key`, then rank. Every rank calls it.

        None as colour takes part in the call and gets None.
        """

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

    # - Persistent forms (MPI 4.0, persistent collective operations): arguments are checked now, and each call of what they
    #   return issues one operation more. The tensors' memory has to stay where it is.

    @abstractmethod
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
        """See :meth:`reduce_scatter_async`."""

    @abstractmethod
    def all_gather_init(
        self,
        send: torch.Tensor,
        recv: torch.Tensor,
        *,
        counts: Sequence[int] | None = None,
        wide: Wide | None = None,
        label: str = "",
    ) -> Start:
        """See :meth:`all_gather_async`."""

    @abstractmethod
    def all_reduce_init(
        self, send: torch.Tensor, recv: torch.Tensor, op: ReduceOp = ReduceOp.SUM, *, label: str = ""
    ) -> Start:
        """See :meth:`all_reduce_async`."""

    # - Synchronous forms

    def reduce_scatter(
        self,
        send: torch.Tensor,
        recv: torch.Tensor,
        op: ReduceOp = ReduceOp.SUM,
        *,
        counts: Sequence[int] | None = None,
        label: str = "",
    ) -> None:
        """`reduce_scatter_async` and `wait`."""
        self.reduce_scatter_async(send, recv, op, counts=counts, label=label).wait()

    def all_gather(
        self, send: torch.Tensor, recv: torch.Tensor, *, counts: Sequence[int] | None = None, label: str = ""
    ) -> None:
        """`all_gather_async` and `wait`."""
        self.all_gather_async(send, recv, counts=counts, label=label).wait()

    def all_reduce(
        self, send: torch.Tensor, recv: torch.Tensor, op: ReduceOp = ReduceOp.SUM, *, label: str = ""
    ) -> None:
        """`all_reduce_async` and `wait`."""
        self.all_reduce_async(send, recv, op, label=label).wait()

    def broadcast(self, tensor: torch.Tensor, root: int = 0, *, label: str = "") -> None:
        """`broadcast_async` and `wait`."""
        self.broadcast_async(tensor, root, label=label).wait()

    def reduce(
        self,
        send: torch.Tensor,
        recv: torch.Tensor | None,
        op: ReduceOp = ReduceOp.SUM,
        root: int = 0,
        *,
        label: str = "",
    ) -> None:
        """`reduce_async` and `wait`."""
        self.reduce_async(send, recv, op, root, label=label).wait()

    def all_to_all(
        self,
        send: torch.Tensor,
        recv: torch.Tensor,
        *,
        send_counts: Sequence[int] | None = None,
        recv_counts: Sequence[int] | None = None,
        label: str = "",
    ) -> None:
        """`all_to_all_async` and `wait`."""
        self.all_to_all_async(send, recv, send_counts=send_counts, recv_counts=recv_counts, label=label).wait()

    def barrier(self, *, label: str = "") -> None:
        """`barrier_async` and `wait`."""
        self.barrier_async(label=label).wait()


__all__ = ["UNCOUNTED", "Communicator", "ReduceOp", "Start", "Wide", "Work"]
