"""A base that is frozen, and small adapters beside its layers that are trained (LoRA, Hu et al., ICLR 2022)."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["WIDTH", "Adapted", "adapters", "base", "bytes_in_memory", "lora", "loss_of"]

WIDTH = 256


class Adapted(nn.Module):
    """A linear layer that is frozen, plus a product of two small matrices, which are trained."""

    def __init__(self, inner: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down = nn.Linear(inner.in_features, rank, bias=False, dtype=inner.weight.dtype)
        self.up = nn.Linear(rank, inner.out_features, bias=False, dtype=inner.weight.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.up(self.down(x))


def base(seed: int = 0, layers: int = 3, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.default_generator.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(layers)))


def lora(seed: int = 0, layers: int = 3, dtype: torch.dtype = torch.float64, rank: int = 8) -> nn.Sequential:
    """All that is random is of `seed`."""
    return nn.Sequential(*(Adapted(layer, rank) for layer in base(seed, layers, dtype)))


def adapters(model: nn.Module) -> list[nn.Parameter]:
    return [each for each in model.parameters() if each.requires_grad]


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    generator = torch.Generator().manual_seed(100 * step + rank)
    return model(torch.randn(4, WIDTH, generator=generator, dtype=dtype)).square().mean()


def bytes_in_memory(parameter: torch.Tensor) -> dict[str, int]:
    """What /proc/self/smaps says, in bytes, of the pages that `parameter` is in: ``Rss``, ``Pss``, ``Shared_Dirty`` …"""
    found: dict[str, int] = {}
    inside = False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            key, _, rest = line.partition(" ")
            if "-" in key and not key.endswith(":"):
                start, stop = (int(number, 16) for number in key.split("-"))
                inside = start <= parameter.data_ptr() < stop
            elif inside and rest.strip().endswith("kB"):
                found[key.rstrip(":")] = 1024 * int(rest.split()[0])
    return found
