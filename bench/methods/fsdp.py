"""FSDP2: ``fully_shard`` on units of the model, then on the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from bench.methods import process_group
from bench.methods.method import MakeOptimizer, Method, Place

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # its place before torch 2.6
    from torch.distributed._composable.fsdp import fully_shard  # type: ignore[attr-defined]

__all__ = ["Fsdp2", "layers", "units"]

_UNIT_BYTES = 25 * 2**20


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
    units are gathered ahead, in forward and in backward; None: as torch does by itself.
    """

    name = "fsdp2"
    launchers = ("torchrun", "mpi")
    defaults: ClassVar[Mapping[str, Any]] = {"reshard": True, "unit_layers": None, "prefetch": None}

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        count = self.options["unit_layers"]
        if count is not None and (count != int(count) or count < 1):
            raise ValueError(f"unit_layers of fsdp2 should be a whole number of at least 1, or None, and is {count}")

    def join(self, device: torch.device) -> Place:
        self._device = device.type
        return process_group.join(device)

    def distribute(self, model: nn.Module, make: MakeOptimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        mesh = init_device_mesh(self._device, (torch.distributed.get_world_size(),))
        reshard = bool(self.options["reshard"])
        count = self.options["unit_layers"]
        made: list[Any] = []
        if count is not None:
            for several in layers(model, int(count)):
                fully_shard(several, mesh=mesh, reshard_after_forward=reshard)
                made.append(several[0])
        else:
            for unit in units(model, _UNIT_BYTES):
                if unit is not model:
                    fully_shard(unit, mesh=mesh, reshard_after_forward=reshard)
                    made.append(unit)
        ahead = int(self.options["prefetch"] or 0)
        for number, unit in enumerate(made if ahead else ()):
            unit.set_modules_to_forward_prefetch(made[number + 1 : number + 1 + ahead])
            unit.set_modules_to_backward_prefetch(made[max(0, number - ahead) : number][::-1])
        fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
        build, arguments = make
        return model, build(model.parameters(), **arguments)

    def leave(self) -> None:
        process_group.leave()
