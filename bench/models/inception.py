"""Inception networks without their auxiliary classifiers.

A block is a set of branches whose outputs are joined along the channels; a branch is a chain of convolutions.

* GoogLeNet (Szegedy et al., CVPR 2015), with batch normalisation, and 3x3 in place of 5x5 convolutions as torchvision's
  published weights have it: 6,624,904 parameters.
* Inception-v3 (Szegedy et al., CVPR 2016): 23,834,568.
* Inception-v4 (Szegedy et al., AAAI 2017): 42,679,816.
"""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["googlenet", "inception_v3", "inceptionv4"]

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


def _pooled(inputs: int, outputs: int, *, whole: bool = False) -> nn.Sequential:
    """`whole`: the mean at a border counts the zeros beyond it."""
    pool = nn.AvgPool2d(3, stride=1, padding=1, count_include_pad=whole)
    return nn.Sequential(pool, _chain(inputs, *_same((outputs, (1, 1)))))


class Join(nn.Module):
    """Branches that read the same input, and whose outputs are joined along the channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


def _fork(inputs: int, outputs: int) -> Join:
    return Join(_chain(inputs, *_same((outputs, (1, 3)))), _chain(inputs, *_same((outputs, (3, 1)))))


def _head(inputs: int, *before: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), *before, nn.Linear(inputs, 1000))


# - GoogLeNet


def _mixed(inputs: int, one: int, three: tuple[int, int], five: tuple[int, int], pooled: int) -> Join:
    """Output channels of the four branches; of those with two convolutions, of both."""
    pool = nn.Sequential(nn.MaxPool2d(3, 1, 1), _chain(inputs, *_same((pooled, (1, 1)))))
    longer = [_chain(inputs, *_same((down, (1, 1)), (up, (3, 3)))) for down, up in (three, five)]
    return Join(_chain(inputs, *_same((one, (1, 1)))), *longer, pool)


def googlenet() -> nn.Module:
    """GoogLeNet: images (N, 3, H, W) to scores (N, 1000)."""
    first = (_chain(3, (64, (7, 7), 2, True)), nn.MaxPool2d(3, 2, 1))
    stem = nn.Sequential(*first, _chain(64, *_same((64, (1, 1)), (192, (3, 3)))), nn.MaxPool2d(3, 2, 1))
    three = (_mixed(192, 64, (96, 128), (16, 32), 32), _mixed(256, 128, (128, 192), (32, 96), 64))
    four = (
        _mixed(480, 192, (96, 208), (16, 48), 64),
        _mixed(512, 160, (112, 224), (24, 64), 64),
        _mixed(512, 128, (128, 256), (24, 64), 64),
        _mixed(512, 112, (144, 288), (32, 64), 64),
        _mixed(528, 256, (160, 320), (32, 128), 128),
    )
    five = (_mixed(832, 256, (160, 320), (32, 128), 128), _mixed(832, 384, (192, 384), (48, 128), 128))
    parts = (*three, nn.MaxPool2d(3, 2, 1), *four, nn.MaxPool2d(3, 2, 1), *five)
    return nn.Sequential(stem, *parts, _head(1024, nn.Dropout(0.2)))


# - Inception-v3


def _grid_35(inputs: int, pooled: int) -> Join:
    one = _chain(inputs, *_same((64, (1, 1))))
    five = _chain(inputs, *_same((48, (1, 1)), (64, (5, 5))))
    twice = _chain(inputs, *_same((64, (1, 1)), (96, (3, 3)), (96, (3, 3))))
    return Join(one, five, twice, _pooled(inputs, pooled, whole=True))


def _to_17() -> Join:
    long = _chain(288, *_same((64, (1, 1)), (96, (3, 3))), (96, (3, 3), 2, False))
    return Join(_chain(288, (384, (3, 3), 2, False)), long, nn.MaxPool2d(3, 2))


def _grid_17(width: int) -> Join:
    """`width`: channels inside the branches of 7x1 and 1x7 convolutions."""
    one = _chain(768, *_same((192, (1, 1))))
    seven = _chain(768, *_same((width, (1, 1)), (width, (1, 7)), (192, (7, 1))))
    inside = ((width, (1, 1)), (width, (7, 1)), (width, (1, 7)), (width, (7, 1)))
    return Join(one, seven, _chain(768, *_same(*inside, (192, (1, 7)))), _pooled(768, 192, whole=True))


def _to_8() -> Join:
    short = _chain(768, *_same((192, (1, 1))), (320, (3, 3), 2, False))
    long = _chain(768, *_same((192, (1, 1)), (192, (1, 7)), (192, (7, 1))), (192, (3, 3), 2, False))
    return Join(short, long, nn.MaxPool2d(3, 2))


def _grid_8(inputs: int) -> Join:
    one = _chain(inputs, *_same((320, (1, 1))))
    three = nn.Sequential(_chain(inputs, *_same((384, (1, 1)))), _fork(384, 384))
    deep = nn.Sequential(_chain(inputs, *_same((448, (1, 1)), (384, (3, 3)))), _fork(384, 384))
    return Join(one, three, deep, _pooled(inputs, 192, whole=True))


def inception_v3() -> nn.Module:
    """Inception v3: images (N, 3, H, W), H and W at least 75, to scores (N, 1000)."""
    down = _chain(3, (32, (3, 3), 2, False), (32, (3, 3), 1, False), (64, (3, 3), 1, True))
    up = _chain(64, (80, (1, 1), 1, False), (192, (3, 3), 1, False))
    stem = nn.Sequential(down, nn.MaxPool2d(3, 2), up, nn.MaxPool2d(3, 2))
    first = (_grid_35(192, 32), _grid_35(256, 64), _grid_35(288, 64), _to_17())
    middle = (_grid_17(width) for width in (128, 160, 160, 192))
    return nn.Sequential(stem, *first, *middle, _to_8(), _grid_8(1280), _grid_8(2048), _head(2048, nn.Dropout()))


# - Inception-v4


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


def _block_c() -> Join:
    one = _chain(1536, *_same((256, (1, 1))))
    three = nn.Sequential(_chain(1536, *_same((384, (1, 1)))), _fork(384, 256))
    deep = nn.Sequential(_chain(1536, *_same((384, (1, 1)), (448, (3, 1)), (512, (1, 3)))), _fork(512, 256))
    return Join(one, three, deep, _pooled(1536, 256))


def inceptionv4() -> nn.Module:
    """Inception v4: images (N, 3, H, W), H and W at least 75, to scores (N, 1000)."""
    a, b, c = ([make() for _ in range(times)] for make, times in ((_block_a, 4), (_block_b, 7), (_block_c, 3)))
    return nn.Sequential(_stem(), *a, _reduction_a(), *b, _reduction_b(), *c, _head(1536))
