"""Detects optimizers that communicate inside their own ``step()``, as a Muon for DistributedDataParallel does.

Where that is called for the parameters of one rank alone, ranks would meet in collectives about different parameters.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Communicates", "listening", "refuse_inside_parts", "silent"]

_NAMESPACES = ("c10d", "c10d_functional", "_c10d_functional")
_here = threading.local()


class Communicates(RuntimeError):
    """An optimizer called an operation between ranks while it updates a part of the parameters; it was not issued."""


@contextmanager
def silent(*, torchs: bool) -> Iterator[None]:
    """A context in which operations between ranks raise :class:`Communicates`, on this thread.

    With `torchs` also those of torch.distributed, for which every operation of torch's is looked at.
    """

    def refuse(operation: str) -> None:
        raise Communicates(operation)

    with _telling(refuse, torchs=torchs):
        yield


@contextmanager
def listening() -> Iterator[list[str]]:
    """A context that lists the operations between ranks that are called inside, on this thread."""
    found: list[str] = []
    with _telling(found.append, torchs=True):
        yield found


@contextmanager
def _telling(tell: Callable[[str], None], *, torchs: bool) -> Iterator[None]:
    with ExitStack() as stack:
        if torchs and torch.distributed.is_available() and torch.distributed.is_initialized():
            stack.enter_context(_Mode(tell))
        _here.tell = tell
        try:
            yield
        finally:
            _here.tell = None


def refuse_inside_parts(operation: str) -> None:
    """Report an operation between ranks that is about to be issued; communicators call this first.

    Raises :class:`Communicates` inside :func:`silent`.
    """
    tell = getattr(_here, "tell", None)
    if tell is not None:
        tell(operation)


class _Mode(TorchDispatchMode):
    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__()
        self._tell = tell

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # otherwise functions that the optimizer has compiled are not compiled, or raise

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # newer versions ask for this one

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "namespace", None) in _NAMESPACES:
            self._tell(f"{func.overloadpacket.__name__.rstrip('_')} of torch.distributed")  # type: ignore[attr-defined]
        return func(*args, **(kwargs or {}))
