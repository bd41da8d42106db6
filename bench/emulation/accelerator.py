"""A model whose layers have real parameters and sleep instead of computing.

The CPU is free meanwhile, as it is when a GPU computes, and every method sees an ordinary module: nested as the real
model is, with the same parameter names and shapes, gradients handed over layer by layer as backward reaches them.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bench.emulation.profile import EVEN, even, parse_spec
from bench.models.catalog import Workload
from overlap.plan.simulation.profile import Profile, load

__all__ = ["OWN", "Accelerator", "EmulatedLayer", "gradient_bytes", "owners"]

OWN = "own"  # the emulated layer of a module that has both parameters and children
_GRADIENT = 1e-3


class _Timed(torch.autograd.Function):
    """Passes a token on, after the time the layer takes; gradients are made when backward has taken its time."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, forward: float, backward: float, *params: torch.Tensor) -> torch.Tensor:
        time.sleep(forward)
        ctx.seconds = backward
        ctx.like = [(param.shape, param.dtype, param.device) for param in params]
        return token.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        time.sleep(ctx.seconds)
        made = [torch.full(shape, _GRADIENT, dtype=dtype, device=device) for shape, dtype, device in ctx.like]
        return grads[0], None, None, *made


class EmulatedLayer(nn.Module):
    """Parameters of a real layer, and the seconds its forward and backward take."""

    def __init__(self, like: nn.Module, owned: list[str], forward_seconds: float, backward_seconds: float) -> None:
        super().__init__()
        self.seconds = (forward_seconds, backward_seconds)
        for name in owned:
            param = like._parameters[name]
            assert param is not None
            self.register_parameter(name, nn.Parameter(torch.zeros(param.shape, dtype=param.dtype)))

    def forward(self, token: torch.Tensor) -> torch.Tensor:
        passed: torch.Tensor = _Timed.apply(token, *self.seconds, *self.parameters(recurse=False))  # type: ignore[no-untyped-call]
        return passed


class _Emulated(nn.Sequential):
    """The whole model: takes nothing, returns the token, which stands for the loss."""

    def forward(self) -> torch.Tensor:  # type: ignore[override]
        result: torch.Tensor = super().forward(torch.zeros((), requires_grad=True))
        return result


def owners(model: nn.Module) -> Iterator[tuple[str, nn.Module, list[str]]]:
    """Modules with parameters of their own, in order of definition: name, module, parameters. A tied one counts once."""
    seen: set[int] = set()
    for name, module in model.named_modules():
        owned = [key for key, param in module._parameters.items() if param is not None and id(param) not in seen]
        seen |= {id(module._parameters[key]) for key in owned}
        if owned:
            yield name, module, owned


def gradient_bytes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The bytes of each parameter of the modules that :func:`owners` gives."""
    return {
        name: tuple(module._parameters[key].nbytes for key in owned)  # type: ignore[union-attr]
        for name, module, owned in owners(model)
    }


def _nest(layers: list[tuple[list[str], EmulatedLayer]]) -> OrderedDict[str, nn.Module]:
    """Sequentials nested like the names; neighbours with the same beginning share one."""
    groups: OrderedDict[str, list[tuple[list[str], EmulatedLayer]]] = OrderedDict()
    for (first, *rest), layer in layers:
        groups.setdefault(first, []).append((rest, layer))
    nested: OrderedDict[str, nn.Module] = OrderedDict()
    for first, members in groups.items():
        if len(members) == 1 and not members[0][0]:
            nested[first] = members[0][1]
        else:
            nested[first] = nn.Sequential(_nest([(rest or [OWN], layer) for rest, layer in members]))
    return nested


@dataclass(frozen=True)
class Accelerator:
    """An accelerator by name, for one model and batch size."""

    model_name: str
    device: str
    number: float

    @classmethod
    def named(cls, spec: str, batch_size: int) -> Accelerator:
        """The accelerator that `spec` names; raises ``ValueError`` if its batch size is not the run's."""
        model, device, number = parse_spec(spec)
        if number is None:
            number = batch_size
        if device != EVEN and number != batch_size:
            raise ValueError(f"{spec} is a profile of batch size {number:g}, and this run has {batch_size}")
        return cls(model, device, number)

    def profile(self, skeleton: nn.Module) -> Profile:
        if self.device == EVEN:
            return even(self.model_name, [name for name, _, _ in owners(skeleton)], self.number)
        return load(self.model_name, self.device, int(self.number))

    def model(self, chosen: Workload, dilate: float) -> nn.Module:
        """The emulated model. Raises ``ValueError`` when profile and model do not have the same layers."""
        if chosen.name != self.model_name:
            raise ValueError(f"the profile is of {self.model_name} and the model of this run is {chosen.name}")
        with torch.device("meta"):
            skeleton = chosen.build()
        times = {layer.name: layer for layer in self.profile(skeleton).layers}
        parts = list(owners(skeleton))
        missing = {name for name, _, _ in parts} ^ set(times)
        if missing:
            raise ValueError(f"profile and model {chosen.name} differ in the layers {', '.join(sorted(missing)[:5])}")
        layers = []
        for name, module, owned in parts:
            seconds = (dilate * times[name].forward, dilate * times[name].backward)
            layers.append((name.split(".") if name else [OWN], EmulatedLayer(module, owned, *seconds)))
        return _Emulated(_nest(layers))
