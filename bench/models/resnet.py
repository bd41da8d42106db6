"""ResNets (He et al., CVPR 2016); a bottleneck has its stride in the 3x3 convolution. ResNet-50: 25,557,032 parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import nn

__all__ = ["RESNETS"]


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    """Projected where shapes differ."""
    if stride == 1 and inputs == outputs:
        return nn.Sequential()
    return nn.Sequential(_conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))


class Basic(nn.Module):
    """A block of two 3x3 convolutions beside a shortcut."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = _conv(inputs, width, 3, stride), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = _conv(width, width, 3), nn.BatchNorm2d(width)
        self.shortcut = _shortcut(inputs, width, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn1(self.conv1(x)).relu_()
        return (self.bn2(self.conv2(y)) + self.shortcut(x)).relu_()


class Bottleneck(nn.Module):
    """A block of 1x1 down, 3x3, and 1x1 up, beside a shortcut."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.conv1, self.bn1 = _conv(inputs, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = _conv(width, width, 3, stride), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = _conv(width, outputs, 1), nn.BatchNorm2d(outputs)
        self.shortcut = _shortcut(inputs, outputs, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn1(self.conv1(x)).relu_()
        y = self.bn2(self.conv2(y)).relu_()
        return (self.bn3(self.conv3(y)) + self.shortcut(x)).relu_()


def _resnet(block: type[Basic | Bottleneck], depths: tuple[int, ...]) -> nn.Module:
    """Images (N, 3, H, W) to scores (N, 1000)."""
    stem = nn.Sequential(_conv(3, 64, 7, 2), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
    stages, inputs = [], 64
    for stage, depth in enumerate(depths):
        width = 64 * 2**stage
        blocks = []
        for place in range(depth):
            blocks.append(block(inputs, width, 2 if place == 0 and stage > 0 else 1))
            inputs = width * block.expansion
        stages.append(nn.Sequential(*blocks))
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))
    return nn.Sequential(stem, *stages, head)


RESNETS: Mapping[str, Callable[[], nn.Module]] = {
    "resnet18": partial(_resnet, Basic, (2, 2, 2, 2)),
    "resnet34": partial(_resnet, Basic, (3, 4, 6, 3)),
    "resnet50": partial(_resnet, Bottleneck, (3, 4, 6, 3)),
    "resnet101": partial(_resnet, Bottleneck, (3, 4, 23, 3)),
    "resnet152": partial(_resnet, Bottleneck, (3, 8, 36, 3)),
}
