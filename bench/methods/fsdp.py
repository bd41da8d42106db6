"""FSDP2: ``fully_shard`` on units of the model, then on the rest."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from bench.methods import process_group
from bench.methods.method import MakeOptimizer, Method, Place

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # its place before torch 2.6
    from torch.distributed._composable.fsdp import fully_shard  # type: ignore[attr-defined]

__all__ = ["UNIT_BYTES", "Fsdp2", "layers", "units"]

UNIT_BYTES = 25 * 2**20


def _shared(model: nn.Module) -> set[int]:
    """Ids of parameters that belong to more than one module."""
    owners = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    return {param for param, count in owners.items() if count > 1}


def units(model: nn.Module, limit_bytes: float) -> list[nn.Module]:
    """The largest modules whose parameters stay below the limit, and the leaves that do not; lists are looked into.

    Each is called as a whole in forward, which is what ``fully_shard`` needs. Modules with tied parameters are left to
    the root, as FSDP2 shards a tied parameter only within one unit.
    """
    shared = _shared(model)

    def inside(module: nn.Module) -> list[nn.Module]:
        params = list(module.parameters())
        nbytes = sum(p.numel() * p.element_size() for p in params)
        children = list(module.children())
        called = not isinstance(module, (nn.ModuleList, nn.ModuleDict))
        if nbytes and called and (nbytes <= limit_bytes or not children):
            return [] if any(id(p) in shared for p in params) else [module]
        return [unit for child in children for unit in inside(child)]

    return inside(model)


def layers(model: nn.Module, count: int) -> list[list[nn.Module]]:
    """Units of `count` neighbouring leaves with parameters; the last unit takes what is left."""
    leaves = units(model, 0)
    return [leaves[first : first + count] for first in range(0, len(leaves), count)]


class Fsdp2(Method):
    """FSDP2; ``reshard`` is ``reshard_after_forward``: parameters are freed then, and gathered again for backward.

    A unit's parameters are gathered, and its gradients reduced, in one operation. ``unit_layers``: it is so many
    neighbouring layers (torch 2.5 or newer); None: a module of at most 25 MB, as DDP's buckets are. ``prefetch``: so many
    units are gathered ahead, in forward and in backward, the first ones by the root (``set_modules_to_forward_prefetch``,
    ``set_modules_to_backward_prefetch``); None: as torch does by itself. ``replicas``: two axes, and shards within each of
    so many replicas. ``backend``: what torch.distributed runs over; None: gloo for the CPU, NCCL for CUDA. ``beside``:
    ``dear.backend.overlap()`` sends beside computations.
    """

    name = "fsdp2"
    launchers = ("torchrun", "mpi")
    defaults: ClassVar[Mapping[str, Any]] = {
        "reshard": True,
        "unit_layers": None,
        "prefetch": None,
        "replicas": 1,
        "backend": None,
        "beside": False,
    }
    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {"backend": process_group.BACKENDS}

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        for name in ("unit_layers", "prefetch"):
            count = self.options[name]
            if count is not None and (count != int(count) or count < 1):
                raise ValueError(f"{name} of fsdp2 should be a whole number of at least 1, or None, and is {count}")
        replicas = self.options["replicas"]
        if replicas is None or replicas != int(replicas) or replicas < 1:
            raise ValueError(f"replicas of fsdp2 should be a whole number of at least 1 and is {replicas}")
        if self.options["beside"] and self.options["prefetch"] is not None:
            raise ValueError("beside of fsdp2 gathers one module ahead: leave prefetch out")

    def join(self, device: torch.device) -> Place:
        self._device = device
        return process_group.join(device, self.options["backend"])

    def distribute(self, model: nn.Module, make: MakeOptimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        mesh = process_group.mesh(self._device, self.options["backend"], int(self.options["replicas"]))
        reshard = bool(self.options["reshard"])
        count = self.options["unit_layers"]
        made: list[Any] = []
        if count is not None:
            for several in layers(model, int(count)):
                fully_shard(several, mesh=mesh, reshard_after_forward=reshard)
                made.append(several[0])
        else:
            for unit in units(model, UNIT_BYTES):
                if unit is not model:
                    fully_shard(unit, mesh=mesh, reshard_after_forward=reshard)
                    made.append(unit)
        fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
        if self.options["prefetch"] is not None:
            _prefetch(model, made, int(self.options["prefetch"]))
        if self.options["beside"]:
            importlib.import_module("dear.backend").overlap(model)
        build, arguments = make
        return model, build(model.parameters(), **arguments)

    def bytes_over(self) -> str:
        return str(dist.get_backend(process_group.group(self._device, self.options["backend"])))

    def leave(self) -> None:
        process_group.leave()


def _prefetch(root: Any, made: Sequence[Any], ahead: int) -> None:
    """Have each of the units, in the order in which they were `made`, gather so many of those that come next."""
    root.set_modules_to_forward_prefetch(list(made[:ahead]))
    root.set_modules_to_backward_prefetch(list(made[-ahead:][::-1]))
    for number, unit in enumerate(made):
        unit.set_modules_to_forward_prefetch(list(made[number + 1 : number + 1 + ahead]))
        unit.set_modules_to_backward_prefetch(list(made[max(0, number - ahead) : number][::-1]))
