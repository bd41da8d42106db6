"""Found by Python before a test's script runs: spares some hundreds of processes half of what it takes to start and end.

Nothing of it changes what a script does. Jobs that `run_ranks` starts with ``end_as_ever`` run without it, as a user's.
"""

from __future__ import annotations

import atexit
import gc
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

_COMPILER = "torch._dynamo"


@atexit.register  # the first to be registered is the last to run
def _freeze() -> None:
    """End without a last look at what torch has made.

    Twice at its end Python goes through all objects for cycles among them; with torch imported that is up to a second of
    processor time. Whatever a name refers to is let go of as ever; what only a cycle keeps is not.
    """
    if "torch" in sys.modules:
        gc.freeze()


class _Deferred(ModuleType):
    """Torch's compiler, until more is asked of it than optimizers do, which only keep it out of their steps.

    They import it for that, from torch 2.4 to 2.13 at least, and it takes as long to import as torch itself.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python and torch ask every module for such names, and want nothing of the compiler
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        self.load()
        return getattr(self, name)

    def load(self) -> None:
        self.__class__ = ModuleType  # type: ignore[assignment]
        loader = self.__spec__.loader if self.__spec__ is not None else None
        assert isinstance(loader, _Later)
        loader.real.exec_module(self)


class _Later(importlib.abc.Loader):
    def __init__(self, real: importlib.abc.Loader) -> None:
        self.real = real

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Deferred(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        def graph_break(_message: str = "") -> None:
            """Nothing is traced while the compiler is not there."""

        def disable(fn: Callable[..., Any], *args: Any, **options: Any) -> Callable[..., Any]:
            apart = None

            def call(*arguments: Any, **keywords: Any) -> Any:
                nonlocal apart
                if isinstance(module, _Deferred):
                    return fn(*arguments, **keywords)
                apart = apart or module.__dict__["disable"](fn, *args, **options)
                return apart(*arguments, **keywords)

            return call

        module.__dict__.update(graph_break=graph_break, disable=disable)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name == _COMPILER:
            spec = importlib.machinery.PathFinder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Later(spec.loader)
            return spec
        module = sys.modules.get(_COMPILER)
        if name.startswith(f"{_COMPILER}.") and isinstance(module, _Deferred):
            module.load()
        return None


sys.meta_path.insert(0, _Finder())
