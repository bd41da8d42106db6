"""Registering and removing sets of ranks while the job runs."""

from __future__ import annotations

from collections.abc import Iterable

from overlap.horovod.controller.enqueue import runtime, telling_others
from overlap.horovod.controller.operation import Nothing
from overlap.horovod.controller.request import Kind, Request
from overlap.job.process_set import ProcessSet, global_process_set

__all__ = ["add_process_set", "remove_process_set"]

_NAME = "process set"


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Register a set, or one made of these ranks, and return it. On every rank of the job, members or not.

    Raises :class:`Mismatch`, a ``ValueError`` and a ``HorovodInternalError``, on every rank when ranks disagree, when some
    are not in the job or when there is such a set already, and ``ValueError`` for a set that is registered.
    """
    found = runtime()
    with telling_others(Kind.ADD_PROCESS_SET, _NAME, global_process_set):
        wanted = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
        if wanted.process_set_id is not None:
            raise ValueError(f"{wanted} is registered already")
    request = Request(Kind.ADD_PROCESS_SET, _NAME, ranks=tuple(wanted.ranks or ()))
    found.remember(found.submit(request, Nothing()).wait(), wanted)
    return wanted


def remove_process_set(process_set: ProcessSet) -> bool:
    """Forget a set; what is under way in it fails. On every rank of the job.

    Returns False, and does nothing, for a set that is not registered and for the set of all ranks.
    """
    found = runtime()
    with telling_others(Kind.REMOVE_PROCESS_SET, _NAME, global_process_set):
        if not isinstance(process_set, ProcessSet):
            raise TypeError(f"process_set should be a ProcessSet and is {type(process_set).__name__}")
    if not process_set.process_set_id:
        return False
    request = Request(Kind.REMOVE_PROCESS_SET, _NAME, ranks=tuple(process_set.ranks or ()))
    found.forget(found.submit(request, Nothing()).wait())
    return True
