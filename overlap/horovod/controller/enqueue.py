"""Turns the arguments of a function into an operation that all ranks know of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from overlap.core.silence import refuse_inside_parts
from overlap.horovod.controller.errors import NotInitialized
from overlap.horovod.controller.operation import Group, Operation, Pending
from overlap.horovod.controller.request import Kind, Request, Response
from overlap.horovod.controller.runtime import Runtime
from overlap.job.process_set import ProcessSet
from overlap.job.session import Session, current, is_initialized, uninitialized

__all__ = ["attach", "enqueue", "latest", "operation_name", "runtime", "telling_others"]

_SERVICE = "names"
_latest: Runtime | None = None


def attach(session: Session, stand_in: Callable[[Response], Operation]) -> Runtime:
    """The session's runtime, made where there is none yet. On every rank."""
    global _latest
    found = session.services.get(_SERVICE)
    if found is None:
        found = _latest = session.services[_SERVICE] = Runtime(session, stand_in)
    assert isinstance(found, Runtime)
    return found


def runtime() -> Runtime:
    """The runtime of the session. Raises :class:`NotInitialized` before ``init()`` and after ``shutdown()``."""
    found = current().services.get(_SERVICE) if is_initialized() else None
    if found is None:
        raise NotInitialized(uninitialized())
    assert isinstance(found, Runtime)
    return found


def latest() -> Runtime:
    """The runtime that gave out handles, also after ``shutdown()``, when the remaining ones fail."""
    return runtime() if is_initialized() or _latest is None else _latest


def operation_name(kind: Kind, name: str | None, process_set: ProcessSet, *, group: bool = False) -> str:
    """The given name, or the next number of this kind; a group of tensors is never taken for a single one."""
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name should be a string and is {type(name).__name__}")
    found = runtime()
    chosen = found.name(kind, found.group(process_set), name)
    return f"{chosen} (group)" if group else chosen


def enqueue(
    kind: Kind, name: str, process_set: ProcessSet, prepare: Callable[[str, Group], tuple[Request, Operation]]
) -> Pending:
    """Ask for what `prepare` makes of the arguments.

    Where it refuses them the other ranks, who may be waiting for this one, are told, and the error is raised here too.
    """
    refuse_inside_parts(f"dear.{kind.value}()")
    found = runtime()
    group = found.group(process_set)
    with telling_others(kind, name, process_set):
        request, operation = prepare(name, group)
    return found.submit(request, operation)


@contextmanager
def telling_others(kind: Kind, name: str, process_set: ProcessSet) -> Iterator[None]:
    """A context: an error inside, perhaps on this rank alone, fails the operation on every rank."""
    try:
        yield
    except Exception as error:
        found = runtime()
        text = str(error) or type(error).__name__
        found.refuse(Request(kind, name, found.group(process_set).number, refusal=text))
        raise
