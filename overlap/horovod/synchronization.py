"""Waits for an operation, for all ranks, or for ranks that still have data."""

from __future__ import annotations

from typing import Any

from overlap.features.join import joined_ranks_of
from overlap.horovod.controller.enqueue import enqueue, latest, operation_name, runtime
from overlap.horovod.controller.operation import Group, Nothing, Operation
from overlap.horovod.controller.request import Kind, Request
from overlap.job.process_set import ProcessSet, global_process_set
from overlap.job.session import current

__all__ = ["barrier", "join", "poll", "synchronize"]


def poll(handle: int) -> bool:
    """Whether ``synchronize(handle)`` would return at once.

    Raises ``ValueError`` for what is no handle, or one that was synchronized.
    """
    return latest().handles.done(handle)


def synchronize(handle: int) -> Any:
    """Wait for an operation; its tensor, its list of tensors for a group, or None where it was synchronized before.

    Raises ``HorovodInternalError`` when the operation failed: because ranks disagreed, because one of them has shut
    down, or because a connection was lost.
    """
    return latest().handles.wait(handle)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank of `process_set` has come here."""

    def prepare(name: str, group: Group) -> tuple[Request, Operation]:
        return Request(Kind.BARRIER, name, group.number), Nothing()

    enqueue(Kind.BARRIER, operation_name(Kind.BARRIER, None, process_set), process_set, prepare).wait()


def join(device: int = -1) -> int:
    """Wait, out of data, until every rank has come here; meanwhile take part in what the others do. On every rank.

    As in Horovod, others' allreduces get nothing from this rank, their averages divide by the size of the set all the
    same, barriers do not wait, and other collectives fail on them. A distributed optimizer's averages divide by the ranks
    that still contribute.

    Args:
        device: in Horovod, where the zeros are made; here they live on the CPU wherever others' tensors are, so -1 and
            every GPU's number mean the same.

    Returns the last rank to come here. Where it raises (:class:`overlap.features.join.CannotJoin`: what another rank does
    next needs this one), nothing goes on until every rank calls it, this one again.
    """
    if not isinstance(device, int) or device < -1:
        raise ValueError(f"device should be a GPU's number or -1 and is {device!r}")
    found, joined_ranks = runtime(), joined_ranks_of(current())
    again = found.failed_join
    pending = again or found.submit(Request(Kind.JOIN, "join"), Nothing())
    if again is None:
        try:
            for participant in list(current().participants):
                participant.join()
        except BaseException:
            if joined_ranks.failed_here:
                found.failed_join = pending
            raise
    last: int = pending.wait()
    if again is not None:
        found.failed_join = None
        joined_ranks.come_back()
    return last
