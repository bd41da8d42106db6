"""DenseNet-201 (Huang et al., CVPR 2017): every layer reads all earlier ones of its block. 20,013,928 parameters."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["densenet201"]

GROWTH = 32
BOTTLENECK = 4 * GROWTH


class DenseLayer(nn.Module):
    """Adds `GROWTH` channels to what it was given."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(inputs), nn.Conv2d(inputs, BOTTLENECK, 1, bias=False)
        self.bn2, self.conv2 = nn.BatchNorm2d(BOTTLENECK), nn.Conv2d(BOTTLENECK, GROWTH, 3, padding=1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv1(self.bn1(x).relu_())
        return torch.cat((x, self.conv2(self.bn2(y).relu_())), 1)


def _transition(inputs: int) -> nn.Module:
    squeeze = nn.Conv2d(inputs, inputs // 2, 1, bias=False)
    return nn.Sequential(nn.BatchNorm2d(inputs), nn.ReLU(inplace=True), squeeze, nn.AvgPool2d(2))


def densenet201() -> nn.Module:
    """Images (N, 3, H, W) to scores (N, 1000)."""
    channels = 2 * GROWTH
    stem = nn.Conv2d(3, channels, 7, 2, 3, bias=False)
    parts = [nn.Sequential(stem, nn.BatchNorm2d(channels), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))]
    depths = (6, 12, 48, 32)
    for block, depth in enumerate(depths):
        parts.append(nn.Sequential(*(DenseLayer(channels + GROWTH * layer) for layer in range(depth))))
        channels += GROWTH * depth
        if block + 1 < len(depths):
            parts.append(nn.Sequential(_transition(channels)))
            channels //= 2
    pool = (nn.BatchNorm2d(channels), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(*parts, nn.Sequential(*pool, nn.Linear(channels, 1000)))
