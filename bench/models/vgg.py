"""VGGs (Simonyan and Zisserman, ICLR 2015) and the AlexNet before them: most of their parameters are in one layer.

VGG-16, configuration D: 138,357,544 parameters. AlexNet is the one of Krizhevsky, "One weird trick" (2014).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import nn

__all__ = ["VGGS", "alexnet"]

WIDTHS = (64, 128, 256, 512, 512)


def _vgg(depths: tuple[int, ...]) -> nn.Module:
    """Images (N, 3, H, W) to scores (N, 1000)."""
    stages, inputs = [], 3
    for width, depth in zip(WIDTHS, depths, strict=True):
        layers: list[nn.Module] = []
        for _ in range(depth):
            layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU(inplace=True)]
            inputs = width
        stages.append(nn.Sequential(*layers, nn.MaxPool2d(2)))
    head: list[nn.Module] = [nn.AdaptiveAvgPool2d(7), nn.Flatten(), nn.Linear(inputs * 49, 4096), nn.ReLU(inplace=True)]
    head += [nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(4096, 1000)]
    return nn.Sequential(*stages, nn.Sequential(*head))


def alexnet() -> nn.Module:
    """AlexNet: images (N, 3, H, W), H and W at least 63, to scores (N, 1000)."""
    layers: list[nn.Module] = []
    inputs = 3
    for width, kernel, stride, padding, pooled in (
        (64, 11, 4, 2, True),
        (192, 5, 1, 2, True),
        (384, 3, 1, 1, False),
        (256, 3, 1, 1, False),
        (256, 3, 1, 1, True),
    ):
        layers += [nn.Conv2d(inputs, width, kernel, stride, padding), nn.ReLU(inplace=True)]
        layers += [nn.MaxPool2d(3, 2)] if pooled else []
        inputs = width
    head: list[nn.Module] = [nn.AdaptiveAvgPool2d(6), nn.Flatten(), nn.Dropout(), nn.Linear(inputs * 36, 4096)]
    head += [nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Linear(4096, 1000)]
    return nn.Sequential(nn.Sequential(*layers), nn.Sequential(*head))


VGGS: Mapping[str, Callable[[], nn.Module]] = {
    "vgg11": partial(_vgg, (1, 1, 2, 2, 2)),
    "vgg13": partial(_vgg, (2, 2, 2, 2, 2)),
    "vgg16": partial(_vgg, (2, 2, 3, 3, 3)),
    "vgg19": partial(_vgg, (2, 2, 4, 4, 4)),
}
