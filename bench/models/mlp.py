"""Perceptrons of equal layers in equal blocks: 25 M parameters in a hundred layers, 1.7 M in four hundred, 48 M in 48.

And one like a VGG, whose parameters are mostly in one layer near the output.
"""

from __future__ import annotations

from torch import nn

__all__ = ["NARROW", "WIDE", "WIDTH", "mlp", "narrow_mlp", "uneven_mlp", "wide_mlp"]

WIDTH, NARROW, WIDE = 500, 64, 1000


def mlp() -> nn.Module:
    """A perceptron with 1 MB a layer: vectors (N, 500) to scores (N, 500)."""
    return _perceptron(WIDTH, blocks=10, layers=10)


def narrow_mlp() -> nn.Module:
    """A perceptron with 16 KB a layer, so that operations' starts dominate: vectors (N, 64) to scores (N, 64)."""
    return _perceptron(NARROW, blocks=20, layers=20)


def wide_mlp() -> nn.Module:
    """A perceptron of 48 layers of 4 MB: vectors (N, 1000) to scores (N, 1000)."""
    return _perceptron(WIDE, blocks=6, layers=8)


def uneven_mlp() -> nn.Module:
    """A perceptron of 28 layers of 1 MB, one of 70 MB, and two of 1 MB: vectors (N, 500) to scores (N, 500)."""
    large = [nn.Linear(WIDTH, 70 * WIDTH), nn.MaxPool1d(70)]
    return nn.Sequential(_perceptron(WIDTH, blocks=4, layers=7), *large, _perceptron(WIDTH, blocks=1, layers=2))


def _perceptron(width: int, *, blocks: int, layers: int) -> nn.Module:
    def block() -> nn.Module:
        parts: list[nn.Module] = []
        for _ in range(layers):
            parts += [nn.Linear(width, width), nn.ReLU(inplace=True)]
        return nn.Sequential(*parts)

    return nn.Sequential(*(block() for _ in range(blocks)))
