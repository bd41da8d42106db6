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
        self._calls: list[_Call] = []
        _install()
        _all.add(self)

    def watch(self, modules: Iterable[torch.nn.Module]) -> None:
        """Tell of `modules` that are compiled in place, and of all that ``torch.compile`` has made around such modules."""
        for module in modules:
            if module.__dict__.get(_CALL) is not None:
                self.replace(module)
        for module in tuple(_made):
            original = module._modules.get(_ORIGINAL)
            if original is not None:
                self.around(module, original)

    def around(self, made: torch.nn.Module, original: torch.nn.Module) -> None:
        """Tell of calls of `made`, which torch.compile() has made of `original`."""
        if self._concern(original):
            hook = next((each for each in made._forward_pre_hooks.values() if isinstance(each, _Before)), None)
            if hook is None:
                hook = _Before(_Call(original))
                made.register_forward_pre_hook(hook, prepend=True)
                after = made.register_forward_hook(_After(hook.call), always_call=True)
                made._forward_hooks_always_called[after.id] = Ours()  # type: ignore[assignment]  # the key counts
            self._hear(hook.call)

    def replace(self, module: torch.nn.Module) -> None:
        """Tell of calls of `module`, which was compiled in place."""
        if self._concern(module):
            call = module.__dict__[_CALL]
            if not isinstance(call, _InPlace):
                call = module.__dict__[_CALL] = _InPlace(module, call)
            self._hear(call.call)

    def _hear(self, call: _Call) -> None:
        if self not in call.told:
            call.told += (self,)
            self._calls.append(call)

    def remove(self) -> None:
        for call in self._calls:
            call.told = tuple(each for each in call.told if each is not self)
        self._calls.clear()
        _all.discard(self)


class _Call:
    """The calls of a compiled module, and who is told of them."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.told: tuple[CompiledCalls, ...] = ()

    def enter(self, inputs: Any) -> None:
        number = 0
        while number < len(self.told):  # the first one may bring another: what shards a model in its first pass
            self.told[number].enter(self.module, inputs)
            number += 1

    def leave(self, inputs: Any, output: Any) -> None:
        for each in reversed(self.told):
            each.leave(self.module, inputs, output)


class _Before(Ours):
    def __init__(self, call: _Call) -> None:
        self.call = call

    def __call__(self, _made: torch.nn.Module, inputs: Any) -> None:
        if not torch.compiler.is_dynamo_compiling():
            self.call.enter(inputs)


class _After(Ours):
    def __init__(self, call: _Call) -> None:
        self._call = call

    def __call__(self, _made: torch.nn.Module, inputs: Any, output: Any) -> None:
        if not torch.compiler.is_dynamo_compiling():
            self._call.leave(inputs, output)


class _InPlace:
    """Stands in place of the code of a module that was compiled in place."""

    def __init__(self, module: Any, compiled: Callable[..., Any]) -> None:
        self.call, self._compiled = _Call(module), compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():  # inside of other compiled code
            return self.call.module._call_impl(*args, **kwargs)
        output = None
        self.call.enter(args)
        try:
            output = self._compiled(*args, **kwargs)
        finally:
            self.call.leave(args, output)
        return output


_all: weakref.WeakSet[CompiledCalls] = weakref.WeakSet()
_made: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # by torch.compile()


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
    kind = _kind()
    _made.update(() if kind is None else modules_of(kind))


def _registered(module: torch.nn.Module, name: str, inside: torch.nn.Module | None) -> None:
    kind = _kind() if name == _ORIGINAL else None
    if kind is not None and isinstance(module, kind) and inside is not None:
        _made.add(module)
        for each in tuple(_all):
            each.around(module, inside)


def _kind() -> type[torch.nn.Module] | None:
    """The class of modules that torch.compile() makes; None where nothing was compiled in this process so far."""
    found: type[torch.nn.Module] | None = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", None)
    return found
