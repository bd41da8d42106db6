"""DenseNets (Huang et al., CVPR 2017): a layer reads all earlier ones of its block. DenseNet-201: 20,013,928 parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import nn

__all__ = ["DENSENETS"]


class DenseLayer(nn.Module):
    """A layer that adds `growth` channels to its input."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        squeezed = 4 * growth
        self.bn1, self.conv1 = nn.BatchNorm2d(inputs), nn.Conv2d(inputs, squeezed, 1, bias=False)
        self.bn2, self.conv2 = nn.BatchNorm2d(squeezed), nn.Conv2d(squeezed, growth, 3, padding=1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv1(self.bn1(x).relu_())
        return torch.cat((x, self.conv2(self.bn2(y).relu_())), 1)


def _transition(inputs: int) -> nn.Module:
    squeeze = nn.Conv2d(inputs, inputs // 2, 1, bias=False)
    return nn.Sequential(nn.BatchNorm2d(inputs), nn.ReLU(inplace=True), squeeze, nn.AvgPool2d(2))


def _densenet(depths: tuple[int, ...], growth: int = 32) -> nn.Module:
    """Images (N, 3, H, W) to scores (N, 1000)."""
    channels = 2 * growth
    stem = nn.Conv2d(3, channels, 7, 2, 3, bias=False)
    parts = [nn.Sequential(stem, nn.BatchNorm2d(channels), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))]
    for block, depth in enumerate(depths):
        parts.append(nn.Sequential(*(DenseLayer(channels + growth * layer, growth) for layer in range(depth))))
        channels += growth * depth
        if block + 1 < len(depths):
            parts.append(nn.Sequential(_transition(channels)))
            channels //= 2
    pool = (nn.BatchNorm2d(channels), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(*parts, nn.Sequential(*pool, nn.Linear(channels, 1000)))


DENSENETS: Mapping[str, Callable[[], nn.Module]] = {
    "densenet121": partial(_densenet, (6, 12, 24, 16)),
    "densenet161": partial(_densenet, (6, 12, 36, 24), growth=48),
    "densenet169": partial(_densenet, (6, 12, 32, 32)),
    "densenet201": partial(_densenet, (6, 12, 48, 32)),
}
