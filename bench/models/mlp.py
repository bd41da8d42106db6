"""A perceptron of a hundred equal layers, in ten blocks: 25 M parameters spread evenly, the plainest of workloads."""

from __future__ import annotations

from torch import nn

__all__ = ["WIDTH", "mlp"]

WIDTH = 500
BLOCKS, LAYERS = 10, 10


def mlp() -> nn.Module:
    """Vectors (N, 500) to scores (N, 500)."""

    def block() -> nn.Module:
        layers: list[nn.Module] = []
        for _ in range(LAYERS):
            layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)]
        return nn.Sequential(*layers)

    return nn.Sequential(*(block() for _ in range(BLOCKS)))
