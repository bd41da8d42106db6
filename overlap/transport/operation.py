"""Operations among the ranks of a communicator, as values.

comm.run(all_reduce(total, total))            issues an operation and waits for it
work = comm.start(all_gather(shard, whole))   issues it
start = comm.prepare(…)                       checks it now, to be issued many times: start()
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from comm_core import ReduceOp

__all__ = [
    "NOTHING",
    "REDUCTIONS",
    "Collective",
    "Counts",
    "Operation",
    "Wide",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "reduce",
    "reduce_scatter",
]

#: Of elements, by rank; None: not given.
Counts = Sequence[int] | None

#: Stands where a rank sends or receives nothing.
NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


class Collective(Enum):
    """The kinds of operations, by comm_core's names."""

    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    ALL_REDUCE = "all_reduce"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    ALL_TO_ALL = "all_to_all"
    BARRIER = "barrier"


REDUCTIONS = (Collective.REDUCE_SCATTER, Collective.ALL_REDUCE, Collective.REDUCE)


@dataclass(frozen=True, slots=True)
class Wide:
    """fp32 tensors beside the fp16 or bf16 ones of an operation: flat, on the CPU, of the same sizes, apart in memory.

    `send` is rounded into the operation's `send`, to the nearest value, before it travels, and `recv` gets what its `recv`
    has in the end, by whoever moves the bytes and not by the caller (over gloo, some of it by the caller).
    Rounding does not wait for operations issued before.
    """

    send: Tensor
    recv: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """One operation, as a rank sees it. The functions below make them.

    Counts are the numbers of elements that go to, or come from, each rank. A broadcast looks at `recv` alone; `root` is
    where it comes from, or where a reduction goes to. A field that a kind has no use for is not looked at, but `wide`,
    which only reduce-scatters and all-gathers take.
    """

    kind: Collective
    send: Tensor = NOTHING
    recv: Tensor = NOTHING
    op: ReduceOp = ReduceOp.SUM
    root: int = 0
    send_counts: Counts = None
    recv_counts: Counts = None
    wide: Wide | None = None
    label: str = ""

    @property
    def nbytes(self) -> int:
        """Size of the payload."""
        flat = self.recv if self.kind in (Collective.ALL_GATHER, Collective.BROADCAST) else self.send
        return flat.numel() * flat.element_size()


def reduce_scatter(
    send: Tensor,
    recv: Tensor,
    op: ReduceOp = ReduceOp.SUM,
    *,
    counts: Counts = None,
    wide: Wide | None = None,
    label: str = "",
) -> Operation:
    """Reduce `send` over all ranks; rank r receives the `counts[r]` elements of its shard. Never writes `send`.

    Without `counts` the split is balanced: the first `send.numel() % size` ranks get one element more. With `wide`,
    `send` is written after all: see :class:`Wide`.
    """
    return Operation(Collective.REDUCE_SCATTER, send, recv, op, send_counts=counts, wide=wide, label=label)


def all_gather(
    send: Tensor, recv: Tensor, *, counts: Counts = None, wide: Wide | None = None, label: str = ""
) -> Operation:
    """Put every rank's `send` side by side into every rank's `recv`.

    `send` may be this rank's own part of `recv`, which then is not copied. Without `counts` the parts are the
    balanced split of `recv.numel()`. With `wide`, `send` is written, too: see :class:`Wide`.
    """
    return Operation(Collective.ALL_GATHER, send, recv, recv_counts=counts, wide=wide, label=label)


def all_reduce(send: Tensor, recv: Tensor, op: ReduceOp = ReduceOp.SUM, *, label: str = "") -> Operation:
    """Reduce `send` over all ranks into every rank's `recv`, which may be `send` itself."""
    return Operation(Collective.ALL_REDUCE, send, recv, op, label=label)


def broadcast(tensor: Tensor, root: int = 0, *, label: str = "") -> Operation:
    """Overwrite `tensor` on every rank with `root`'s."""
    return Operation(Collective.BROADCAST, tensor, tensor, root=root, label=label)


def reduce(
    send: Tensor, recv: Tensor | None, op: ReduceOp = ReduceOp.SUM, root: int = 0, *, label: str = ""
) -> Operation:
    """Reduce `send` over all ranks into `root`'s `recv`; the other ranks may pass None for it."""
    return Operation(Collective.REDUCE, send, NOTHING if recv is None else recv, op, root, label=label)


def all_to_all(
    send: Tensor,
    recv: Tensor,
    *,
    send_counts: Counts = None,
    recv_counts: Counts = None,
    label: str = "",
) -> Operation:
    """Send part i of `send` to rank i and receive part j of `recv` from rank j. Without counts: equal parts."""
    return Operation(Collective.ALL_TO_ALL, send, recv, send_counts=send_counts, recv_counts=recv_counts, label=label)


def barrier(*, label: str = "") -> Operation:
    """Exchange nothing: done once every rank has issued it."""
    return Operation(Collective.BARRIER, label=label)
