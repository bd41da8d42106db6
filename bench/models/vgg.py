"""VGG-16 (Simonyan and Zisserman, ICLR 2015), configuration D. 138,357,544 parameters, most of them in one layer."""

from __future__ import annotations

from torch import nn

__all__ = ["vgg16"]


def vgg16() -> nn.Module:
    """Images (N, 3, H, W) to scores (N, 1000)."""
    stages, inputs = [], 3
    for width, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        layers: list[nn.Module] = []
        for _ in range(depth):
            layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU(inplace=True)]
            inputs = width
        stages.append(nn.Sequential(*layers, nn.MaxPool2d(2)))
    head: list[nn.Module] = [nn.AdaptiveAvgPool2d(7), nn.Flatten(), nn.Linear(inputs * 49, 4096), nn.ReLU(inplace=True)]
    head += [nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(4096, 1000)]
    return nn.Sequential(*stages, nn.Sequential(*head))
