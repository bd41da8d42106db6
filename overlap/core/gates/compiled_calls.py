"""Calls of compiled modules, told from outside: before the guards of their code run, and after the code.

Guards look at the strides of all parameters that the code reads, in an order that is the compiler's. Parameters that are
away between uses have others, so they have to be back before the first guard runs: hooks that are traced, and gates in
guards (``compiled.py``), come too late.

    outside   enter(module)  ▶  guards, compiled forward of all inside (graph breaks, too)  ▶  leave(module, output)
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from overlap.core.gates.gates import Ours
from overlap.core.gates.holders import modules_of

__all__ = ["CompiledCalls"]

_Told = Callable[..., None]
_ORIGINAL = "_orig_mod"  # what the module that torch.compile() returns has in it
_CALL = "_compiled_call_impl"  # what ``module.compile()`` sets


class CompiledCalls:
    """Tells of calls of compiled modules, of those that `concern` says yes to, until it is :meth:`removed <remove>`.

    `enter(module, inputs)` is called before, and `leave(module, inputs, output)` after it, also where that raises; `output`
    is None then. `module` is the one that was compiled, before or after this was made: by ``torch.compile(module)`` or by
    ``module.compile()``. Not told: modules inside of other compiled code.
    """

    def __init__(self, enter: _Told, leave: _Told, concern: Callable[[torch.nn.Module], bool]) -> None:
        self.enter, self.leave, self._concern = enter, leave, concern
        self._handles: dict[int, tuple[RemovableHandle, RemovableHandle]] = {}  # by the id of torch.compile()'s module
        self._calls: list[_Call] = []
        _install()
        _all.add(self)

    def watch(self, modules: Iterable[torch.nn.Module]) -> None:
        """Tell of `modules` that are compiled, and of all others that ``torch.compile`` has made around such modules."""
        made = _made_by_compile()
        for module in modules if made is None else dict.fromkeys([*modules, *modules_of(made)]):
            original = module._modules.get(_ORIGINAL)
            if made is not None and isinstance(module, made) and original is not None:
                self.around(module, original)
            if module.__dict__.get(_CALL) is not None:
                self.replace(module)

    def around(self, made: torch.nn.Module, original: torch.nn.Module) -> None:
        """Tell of calls of `made`, which torch.compile() has made of `original`."""
        if id(made) in self._handles or not self._concern(original):
            return
        before = made.register_forward_pre_hook(_Hook(self.enter, original), prepend=True)
        after = made.register_forward_hook(_Hook(self.leave, original), always_call=True)
        made._forward_hooks_always_called[after.id] = Ours()  # type: ignore[assignment]  # the key counts
        self._handles[id(made)] = before, after

    def replace(self, module: torch.nn.Module) -> None:
        """Tell of calls of `module`, which was compiled in place."""
        call = module.__dict__[_CALL]
        if not self._concern(module):
            return
        if not isinstance(call, _Call):
            call = module.__dict__[_CALL] = _Call(module, call)
        if self not in call.told:
            call.told += (self,)
            self._calls.append(call)

    def remove(self) -> None:
        for handles in self._handles.values():
            for handle in handles:
                handle.remove()
        for call in self._calls:
            call.told = tuple(each for each in call.told if each is not self)
            if not call.told and call.module.__dict__.get(_CALL) is call:
                call.module.__dict__[_CALL] = call.compiled
        self._handles.clear()
        self._calls.clear()
        _all.discard(self)


class _Hook(Ours):
    def __init__(self, told: _Told, original: torch.nn.Module) -> None:
        self._told, self._original = told, original

    def __call__(self, _made: torch.nn.Module, *rest: Any) -> None:
        if not torch.compiler.is_dynamo_compiling():
            self._told(self._original, *rest)


class _Call:
    """Stands in place of the code of a module that was compiled in place."""

    def __init__(self, module: Any, compiled: Callable[..., Any]) -> None:
        self.module, self.compiled = module, compiled
        self.told: tuple[CompiledCalls, ...] = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():  # inside of other compiled code
            return self.module._call_impl(*args, **kwargs)
        told, output = self.told, None
        for each in told:
            each.enter(self.module, args)
        try:
            output = self.compiled(*args, **kwargs)
        finally:
            for each in reversed(told):
                each.leave(self.module, args, output)
        return output


_all: weakref.WeakSet[CompiledCalls] = weakref.WeakSet()


@functools.cache
def _install() -> None:
    """From now on, hear of modules that are compiled in this process."""
    compile = torch.nn.Module.compile

    @functools.wraps(compile)
    def compile_and_tell(self: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        compile(self, *args, **kwargs)
        for each in tuple(_all):
            each.replace(self)

    torch.nn.Module.compile = compile_and_tell  # type: ignore[method-assign]
    torch.nn.modules.module.register_module_module_registration_hook(_registered)


def _registered(module: torch.nn.Module, name: str, inside: torch.nn.Module | None) -> None:
    if name != _ORIGINAL or inside is None:
        return
    made = _made_by_compile()
    if made is not None and isinstance(module, made):
        for each in tuple(_all):
            each.around(module, inside)


def _made_by_compile() -> type[torch.nn.Module] | None:
    """The class of modules that torch.compile() makes; None where nothing was compiled in this process so far."""
    found = sys.modules.get("torch._dynamo.eval_frame")
    made: type[torch.nn.Module] | None = getattr(found, "OptimizedModule", None)
    return made
