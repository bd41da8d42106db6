"""Inception-v4 (Szegedy et al., AAAI 2017) without the auxiliary classifier. 42,679,816 parameters.

A block is a set of branches whose outputs are joined along the channels; a branch is a chain of convolutions.
"""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["inceptionv4"]

Kernel = tuple[int, int]
# (output channels, kernel, stride, padded): with padding the size of the picture stays.
Step = tuple[int, Kernel, int, bool]


def _chain(inputs: int, *steps: Step) -> nn.Sequential:
    parts: list[nn.Module] = []
    for outputs, kernel, stride, padded in steps:
        padding = (kernel[0] // 2, kernel[1] // 2) if padded else (0, 0)
        parts.append(nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False))
        parts += [nn.BatchNorm2d(outputs, eps=1e-3), nn.ReLU(inplace=True)]
        inputs = outputs
    return nn.Sequential(*parts)


def _same(*pairs: tuple[int, Kernel]) -> list[Step]:
    return [(outputs, kernel, 1, True) for outputs, kernel in pairs]


def _pooled(inputs: int, outputs: int) -> nn.Sequential:
    pool = nn.AvgPool2d(3, stride=1, padding=1, count_include_pad=False)
    return nn.Sequential(pool, _chain(inputs, *_same((outputs, (1, 1)))))


class Join(nn.Module):
    """Every branch reads the same input; outputs are joined along the channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


def _stem() -> nn.Sequential:
    down = _chain(3, (32, (3, 3), 2, False), (32, (3, 3), 1, False), (64, (3, 3), 1, True))
    first = Join(nn.MaxPool2d(3, 2), _chain(64, (96, (3, 3), 2, False)))
    last: Step = (96, (3, 3), 1, False)
    short = _chain(160, *_same((64, (1, 1))), last)
    long = _chain(160, *_same((64, (1, 1)), (64, (1, 7)), (64, (7, 1))), last)
    return nn.Sequential(down, first, Join(short, long), Join(_chain(192, (192, (3, 3), 2, False)), nn.MaxPool2d(3, 2)))


def _block_a() -> Join:
    one = _chain(384, *_same((96, (1, 1))))
    three = _chain(384, *_same((64, (1, 1)), (96, (3, 3))))
    five = _chain(384, *_same((64, (1, 1)), (96, (3, 3)), (96, (3, 3))))
    return Join(one, three, five, _pooled(384, 96))


def _reduction_a() -> Join:
    long = _chain(384, *_same((192, (1, 1)), (224, (3, 3))), (256, (3, 3), 2, False))
    return Join(_chain(384, (384, (3, 3), 2, False)), long, nn.MaxPool2d(3, 2))


def _block_b() -> Join:
    one = _chain(1024, *_same((384, (1, 1))))
    seven = _chain(1024, *_same((192, (1, 1)), (224, (1, 7)), (256, (7, 1))))
    twice = _chain(1024, *_same((192, (1, 1)), (192, (7, 1)), (224, (1, 7)), (224, (7, 1)), (256, (1, 7))))
    return Join(one, seven, twice, _pooled(1024, 128))


def _reduction_b() -> Join:
    short = _chain(1024, *_same((192, (1, 1))), (192, (3, 3), 2, False))
    long = _chain(1024, *_same((256, (1, 1)), (256, (1, 7)), (320, (7, 1))), (320, (3, 3), 2, False))
    return Join(short, long, nn.MaxPool2d(3, 2))


def _fork(inputs: int) -> Join:
    return Join(_chain(inputs, *_same((256, (1, 3)))), _chain(inputs, *_same((256, (3, 1)))))


def _block_c() -> Join:
    one = _chain(1536, *_same((256, (1, 1))))
    three = nn.Sequential(_chain(1536, *_same((384, (1, 1)))), _fork(384))
    deep = nn.Sequential(_chain(1536, *_same((384, (1, 1)), (448, (3, 1)), (512, (1, 3)))), _fork(512))
    return Join(one, three, deep, _pooled(1536, 256))


def inceptionv4() -> nn.Module:
    """Images (N, 3, H, W), H and W at least 75, to scores (N, 1000)."""
    a, b, c = ([make() for _ in range(times)] for make, times in ((_block_a, 4), (_block_b, 7), (_block_c, 3)))
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1536, 1000))
    return nn.Sequential(_stem(), *a, _reduction_a(), *b, _reduction_b(), *c, head)
