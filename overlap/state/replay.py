"""Operations that were recorded on tensors without memory, and their values, computed when somebody asks.

A recorded operation knows its inputs as they were: each `View` names the last operation that had written to its memory by
then. So the values of one tensor need the operations that lead to it, and no others.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, NamedTuple

import torch

__all__ = [
    "Memory",
    "Operation",
    "Recent",
    "View",
    "changed",
    "leaves",
    "passing",
    "real_view",
    "replay",
    "silence",
    "silent",
    "view_of",
    "when",
]

CPU = torch.device("cpu")
_numbers = count()
_SMALL = 1 << 20  # bytes
_quiet = threading.local()


class Memory:
    """A storage that does not exist yet, of `nbytes`. ``latest()`` is its last operation; None once no tensor is in it."""

    __slots__ = ("latest", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.latest: Callable[[], Operation | None] = _none


def _none() -> None:
    return None


class View(NamedTuple):
    """A strided tensor in `memory` after `writer`, its last operation; None if earlier values do not matter."""

    memory: Memory
    writer: Operation | None
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conj: bool
    neg: bool


class Operation:
    """An operation of ATen: it makes `results`, by number among its outputs, or writes to some of its arguments.

    Tensors among `args` and `kwargs` are Views; real ones are copies. `random` is the state of the generator before a
    random operation, ``(5056,)`` bytes.
    """

    __slots__ = ("args", "default_dtype", "function", "kwargs", "number", "random", "results")

    def __init__(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        random: torch.Tensor | None,
    ) -> None:
        self.number = next(_numbers)
        self.function = function
        self.args = args
        self.kwargs = kwargs
        self.random = random
        self.default_dtype = torch.get_default_dtype()
        self.results: dict[int, View] = {}

    def views(self) -> Iterator[View]:
        """Its inputs that are not real."""
        for leaf in leaves((self.args, self.kwargs)):
            if isinstance(leaf, View):
                yield leaf


# Values of memory after an operation.
Recent = dict[Memory, tuple[Operation, torch.UntypedStorage]]


def leaves(value: Any) -> Iterator[Any]:
    """What lies in nested tuples, lists and dicts."""
    if isinstance(value, (tuple, list)) and not isinstance(value, View):
        for part in value:
            yield from leaves(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from leaves(part)
    else:
        yield value


def changed(change: Callable[[Any], Any], value: Any) -> Any:
    """Nested tuples, lists and dicts as in `value`, with ``change(leaf)`` for each leaf."""
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([changed(change, part) for part in value])
    if kind is dict:
        return {key: changed(change, part) for key, part in value.items()}
    return change(value)


def view_of(tensor: torch.Tensor, memory: Memory, writer: Operation | None) -> View:
    """`tensor`, which is strided and on the meta device, as it is now."""
    return View(
        memory,
        writer,
        tensor.dtype,
        tuple(tensor.size()),  # not .shape, which lazy parameters refuse
        tuple(tensor.stride()),
        int(tensor.storage_offset()),
        tensor.is_conj(),
        tensor.is_neg(),
    )


def real_view(view: View, storage: torch.UntypedStorage) -> torch.Tensor:
    """The tensor that `view` describes, in `storage`, which grows if it is too small."""
    real = torch.empty(0, dtype=view.dtype, device=CPU)
    real.set_(storage, view.offset, view.size, view.stride)  # type: ignore[call-overload]
    real = real.conj() if view.conj else real
    return torch._neg_view(real) if view.neg else real


@contextmanager
def silence() -> Iterator[None]:
    """Inside, this thread's operations are those of plain torch: not recorded, and without gradients or autocast."""
    before = silent()
    _quiet.on = True
    try:
        with torch._C.DisableTorchFunction(), torch.no_grad(), torch.autocast("cpu", enabled=False):
            yield
    finally:
        _quiet.on = before


def silent() -> bool:
    """Whether this thread is inside ``silence()``."""
    return getattr(_quiet, "on", False)


@contextmanager
def when(operation: Operation) -> Iterator[dict[str, Any]]:
    """Inside, defaults and the generator are as before `operation`. Gives its keyword arguments on the CPU."""
    kwargs = dict(operation.kwargs)
    if kwargs.get("device") is not None:
        kwargs["device"] = CPU
    default, state = torch.get_default_dtype(), None
    if operation.random is not None and kwargs.get("generator") is not None:
        kwargs["generator"] = torch.Generator().set_state(operation.random)
    elif operation.random is not None:
        state = torch.get_rng_state()
        torch.set_rng_state(operation.random)
    torch.set_default_dtype(operation.default_dtype)
    try:
        yield kwargs
    finally:
        torch.set_default_dtype(default)
        if state is not None:
            torch.set_rng_state(state)


def passing(nbytes: int) -> torch.UntypedStorage:
    """Memory that is needed for a moment: pages of their own, which the system has back as soon as they are freed.

    glibc takes blocks of up to 32 MiB from its heap, and cannot use them again for another one if anything small has been
    put behind them. A model whose tensors are made one after the other would grow to its full size.
    """
    if nbytes < _SMALL:
        return torch.UntypedStorage(nbytes, device="cpu")
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8).untyped_storage()


def replay(
    memory: Memory, writer: Operation | None, passes: bool, recent: Recent | None = None
) -> torch.UntypedStorage:
    """The content of `memory` after `writer`, in a storage of its own. Intermediate results are freed after their last use.

    `passes`: the storage is for a moment only, see ``passing``. Memory in `recent` needs no operations again; what is there
    is used up, and replaced by all that was computed here and is still in use. The result is part of it then.

    The generator is left as it was.
    """
    operations, known = _leading_to(memory, writer, recent or {})
    if recent is not None:
        recent.clear()
    storages = {held: storage for held, (_, storage) in known.items()}
    done = {operation for operation, _ in known.values()}.union(operations)
    last = {view.memory: operation for operation in operations for view in operation.views()}

    def storage_of(wanted: Memory) -> torch.UntypedStorage:
        if wanted not in storages:
            short = passes or wanted is not memory
            storages[wanted] = passing(wanted.nbytes) if short else torch.UntypedStorage(wanted.nbytes, device="cpu")
        return storages[wanted]

    def real(value: Any) -> Any:
        return real_view(value, storage_of(value.memory)) if isinstance(value, View) else value

    def stays(held: Memory) -> bool:
        return held is memory or (recent is not None and held.latest() in done)

    with silence():
        for operation in operations:
            with when(operation) as kwargs:
                args, kwargs = changed(real, (operation.args, kwargs))
                outputs = list(leaves(operation.function(*args, **kwargs)))
            for number, view in operation.results.items():
                storages[view.memory] = _laid_out(outputs[number], view)
            for held in {view.memory for view in (*operation.views(), *operation.results.values())}:
                if last.get(held, operation) is operation and not stays(held):
                    storages.pop(held, None)
            del args, kwargs, outputs
        result = storage_of(memory)
    if recent is not None:
        for held, storage in storages.items():
            latest = held.latest()
            if latest is not None and latest in done:
                recent[held] = latest, storage
    return result


def _leading_to(memory: Memory, writer: Operation | None, recent: Recent) -> tuple[list[Operation], Recent]:
    """The operations that lead to `writer`, in the order in which they were recorded, and where in `recent` they begin."""
    found: set[Operation] = set()
    known: Recent = {}
    waiting = [(memory, writer)]
    while waiting:
        held, operation = waiting.pop()
        if held in recent and recent[held][0] is operation:
            known[held] = recent[held]
        elif operation is not None and operation not in found:
            found.add(operation)
            waiting += [(view.memory, view.writer) for view in operation.views()]
    for operation in found:
        for view in (*operation.views(), *operation.results.values()):
            if view.memory in known and operation.number <= known[view.memory][0].number:
                return _leading_to(memory, writer, {})  # earlier values of it are needed, too
    return sorted(found, key=lambda operation: operation.number), known


def _laid_out(output: torch.Tensor, view: View) -> torch.UntypedStorage:
    """The storage of `output`, with strides as the meta device foretold them."""
    like = (tuple(output.shape), tuple(output.stride()), int(output.storage_offset()))
    if like == (view.size, view.stride, view.offset) and output.untyped_storage().nbytes() >= view.memory.nbytes:
        return output.untyped_storage()
    storage = torch.UntypedStorage(view.memory.nbytes, device="cpu")
    real_view(view, storage).copy_(output)
    return storage
