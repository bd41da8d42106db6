"""Finds the modules that hold given parameters, for Horovod's scripts, which pass parameters only."""

from __future__ import annotations

import gc
import itertools
import logging
from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["Strangers", "hands_out", "holders", "modules_of"]

log = logging.getLogger("dear")


def holders(parameters: Iterable[torch.Tensor]) -> list[torch.nn.Module]:
    """All modules of this process that own one of `parameters`, and those that contain such modules, at any depth."""
    wanted = {id(parameter) for parameter in parameters}
    found: dict[int, torch.nn.Module] = {}
    parents: dict[int, list[torch.nn.Module]] = {}
    for module in _modules():
        if any(id(parameter) in wanted for parameter in dict.values(module._parameters)):
            found[id(module)] = module
        for child in module._modules.values():
            parents.setdefault(id(child), []).append(module)
    pending = list(found)
    while pending:
        for parent in parents.get(pending.pop(), ()):
            if id(parent) not in found:
                found[id(parent)] = parent
                pending.append(id(parent))
    return list(found.values())


class Strangers:
    """All parameters of modules in this process, by address; searched once, when somebody asks."""

    def __init__(self) -> None:
        self._found: dict[int, list[torch.nn.Parameter]] | None = None

    def at(self, address: int) -> list[torch.nn.Parameter]:
        if self._found is None:
            self._found = {}
            for module in _modules():
                for parameter in dict.values(module._parameters):
                    if parameter is not None and parameter.layout is torch.strided and parameter.numel():
                        self._found.setdefault(parameter.data_ptr(), []).append(parameter)
        return self._found.get(address, [])


def hands_out(module: torch.nn.Module) -> bool:
    """Whether Python reads parameters from `module`; not so for TorchScript's, which take no hooks either."""
    return isinstance(module.__dict__.get("_parameters"), dict)


def modules_of(kind: type[torch.nn.Module]) -> list[torch.nn.Module]:
    """All modules of this process that are of `kind`."""
    return [module for module in _modules() if isinstance(module, kind)]


def _modules() -> list[torch.nn.Module]:
    # There are millions of objects: nothing runs for each of them but a look at its type, without Python's own loop.
    # Its exact type: isinstance() would ask proxies of all kinds for their class.
    things = _tracked()
    modules = itertools.compress(things, map(_kinds().__contains__, map(type, things)))
    return [module for module in modules if hands_out(module)]


def _kinds() -> set[type]:
    """Module and all classes made from it."""
    kinds: set[type] = set()
    pending: list[type] = [torch.nn.Module]
    while pending:
        kind = pending.pop()
        if kind not in kinds:
            kinds.add(kind)
            pending += type.__subclasses__(kind)
    return kinds


def _tracked() -> list[Any]:
    """What the garbage collector knows, also what it was told to leave alone, which it takes up again for good.

    Nobody can read what is frozen, and freezing again would freeze all that was made since: a model or an optimizer
    that is dropped later would stay for ever.
    """
    if gc.get_freeze_count() > 0:
        gc.unfreeze()
        log.info("gc.unfreeze() was called, to find the modules of parameters that were given without any")
    return gc.get_objects()
