"""Makes code of ``torch.compile`` wait for parameters, in the guards that it evaluates before each call.

Hooks and gated dictionaries are traced once; the code made from the trace reads the parameters anew in each call and
would pass by every gate. What it does run in each call, before it reads anything, are its guards, and an opaque object
is guarded by a function of the owner's. So the traced path of a gate looks at an :class:`Entry`, and from then on every
call of that code waits for the modules that it contains, and for no others:

    block0(x)  guards: wait for block0's buckets ─▶ compiled forward     block1(x)  guards: wait for block1's …

Code compiled before the gates were set is traced again, since the type of the gated dictionary is guarded too.

[Note: older compilers] Before torch 2.13 there are no opaque objects, or they do less. Gates then break the graph: they
are called between its pieces as they are without a compiler, and ``fullgraph=True`` raises. What they call must not be
traced: these compilers lose track of some of its dictionaries and sets.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

__all__ = ["GUARDS", "Entry", "keep_untraced", "only_looked_at", "outside_compilation", "untraced"]

# Opaque objects: torch.compile does not look into them, and their owner defines their guards. Names in torch are private.
# Where the base class is, its name, that of the function which registers a class, and of the kind of objects.
_NAMES = (
    ("torch._custom_class_base", "CustomClassBase", "register_custom_class", "symbolic"),
    ("torch._opaque_base", "OpaqueBase", "register_opaque_type", "reference"),  # before torch 2.15
)


def _find() -> tuple[type, Callable[..., None], Any, str] | None:
    if torch.__version__ < "2.13":
        return None  # not there, or they do less
    for module, base, function, kind in _NAMES:
        with contextlib.suppress(ImportError, AttributeError):
            objects = importlib.import_module("torch._library.opaque_object")
            found = getattr(importlib.import_module(module), base)
            return found, getattr(objects, function), objects.MemberType.USE_REAL, kind
    return None  # torch promises nobody that they stay


_found = _find()
#: Whether compiled code waits in its guards; otherwise gates break its graph.
GUARDS = _found is not None

if TYPE_CHECKING:
    _Opaque = object
else:
    _Opaque = object if _found is None else _found[0]

_Visit = Callable[[torch.nn.Module], None]


class Entry(_Opaque):
    """The point at which compiled code that contains `module`'s forward waits for it, before the code starts."""

    def __init__(self, module: torch.nn.Module, enter: _Visit, leave: _Visit) -> None:
        self._module, self._enter, self._leave = module, enter, leave

    def await_module(self) -> None:
        """While tracing, wait now, and make the code that is being compiled wait in each call."""
        self._enter(self._module)
        self._leave(self._module)

    def __deepcopy__(self, memo: object) -> Entry:
        return self


def _guard(entry: Entry) -> list[object]:
    entry.await_module()
    return []  # nothing that could call for another compilation


if _found is not None:
    _, _register, _real, _kind = _found
    _register(Entry, typ=_kind, guard_fn=_guard, members={"await_module": _real})


def untraced(call: Callable[..., None]) -> Callable[..., None]:
    """`call`, hidden from compilers that must not look into it: [Note: older compilers]."""
    return call if GUARDS else torch.compiler.disable(call)


def keep_untraced(kind: type, *names: str) -> None:
    """Hide these methods of `kind` from compilers; compiled code that calls them calls them as they are."""
    for name in names:
        method = getattr(kind, name)
        if not hasattr(method, "_dear_untraced"):
            why = "ranks communicate in it, so it is called as it is; leave fullgraph=True out, or call it outside"
            options = {"reason": why} if "reason" in inspect.signature(torch.compiler.disable).parameters else {}
            disabled = torch.compiler.disable(method, **options)
            disabled._dear_untraced = True
            setattr(kind, name, disabled)


def only_looked_at(parameter: torch.nn.Parameter, layer: torch.nn.Module) -> bool:
    """Whether a compiler touches `parameter` of a module in `layer` only to look at it, before it traces that module.

    Where gates break the graph, each module touches its own when the pieces run.
    """
    if not GUARDS:
        return torch._guards.CompileContext.try_get() is not None
    return torch.compiler.is_compiling() and not any(parameter is mine for mine in dict.values(layer._parameters))


@contextlib.contextmanager
def outside_compilation() -> Iterator[None]:
    """A context for an update that a compilation happens to wait for.

    torch's optimizers compute differently, to fewer digits, where ``torch.compiler.is_compiling()``.
    """
    compiler: Any = torch.compiler
    compiling = compiler.is_compiling()
    if compiling:
        compiler._is_compiling_flag = False
    try:
        yield
    finally:
        if compiling:
            compiler._is_compiling_flag = True
