"""ResNet-50 (He et al., CVPR 2016): bottlenecks with the stride in their 3x3 convolution. 25,557,032 parameters."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["resnet50"]

EXPANSION = 4


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)


class Bottleneck(nn.Module):
    """1x1 down, 3x3, 1x1 up, beside a shortcut that is projected where shapes differ."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * EXPANSION
        self.conv1, self.bn1 = _conv(inputs, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = _conv(width, width, 3, stride), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = _conv(width, outputs, 1), nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(_conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn1(self.conv1(x)).relu_()
        y = self.bn2(self.conv2(y)).relu_()
        return (self.bn3(self.conv3(y)) + self.shortcut(x)).relu_()


def resnet50() -> nn.Module:
    """Images (N, 3, H, W) to scores (N, 1000)."""
    stem = nn.Sequential(_conv(3, 64, 7, 2), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
    stages, inputs = [], 64
    for stage, depth in enumerate((3, 4, 6, 3)):
        width = 64 * 2**stage
        blocks = []
        for block in range(depth):
            blocks.append(Bottleneck(inputs, width, 2 if block == 0 and stage > 0 else 1))
            inputs = width * EXPANSION
        stages.append(nn.Sequential(*blocks))
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))
    return nn.Sequential(stem, *stages, head)
