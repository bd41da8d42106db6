"""What layers of the models of torchgpipe's benchmarks compute and move, by arithmetic (pure).

U-Net (Ronneberger et al., 2015), as torchgpipe has it: convolutions with dropout and instance norm, on images of 192 × 192.
AmoebaNet-D (Real et al., 2019), on images of 224 × 224.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

__all__ = ["Layer", "amoebanet", "unet"]


class Layer(NamedTuple):
    """Forward of one sample: floating-point operations, and bytes read and written; and the number of parameters."""

    flops: float = 0.0
    nbytes: float = 0.0
    parameters: int = 0

    def __add__(self, other: object) -> Layer:
        assert isinstance(other, Layer)
        return Layer(self.flops + other.flops, self.nbytes + other.nbytes, self.parameters + other.parameters)

    def seconds(self, flops: float, nbytes: float) -> float:
        """On a device of so many operations, and bytes, per second, which does both at once."""
        return max(self.flops / flops, self.nbytes / nbytes)


def _moved(channels: int, size: int, times: float, parameters: int = 0) -> Layer:
    """Reads and writes an image of `size` × `size` so often, and computes little."""
    return Layer(0.0, 4.0 * times * channels * size * size, parameters)


def _conv(into: int, out: int, window: int, size: int, before: int | None = None) -> Layer:
    """A convolution to an image of `size` × `size`, from one of another size `before`; `window`: places that it sees."""
    weights, wide = into * out * window, size if before is None else before
    return Layer(2.0 * weights * size * size, 4.0 * (into * wide * wide + out * size * size), weights)


def unet(depth: int = 5, convolutions: int = 5, channels: int = 64, size: int = 192) -> list[Layer]:
    """The layers of U-Net (`convolutions`, `channels`), in order."""

    def block(into: int, inside: int, out: int, size: int) -> Iterator[Layer]:
        widths = [into, *[inside] * (convolutions - 1), out]
        for before, after in pairwise(widths):
            yield _conv(before, after, 9, size)
            yield _moved(after, size, 2)  # dropout
            yield _moved(after, size, 3)  # norm
            yield _moved(after, size, 2)  # activation

    found: list[Layer] = []
    for level in range(depth):
        out = channels * 2**level
        found += block(out // 2 if level else 3, out, out, size)
        found += [Layer(), _moved(out, size, 1.25)]  # stash, and pool
        size //= 2
    wide = channels * 2**depth
    found += block(wide // 2, wide, wide // 2, size)
    for level in reversed(range(depth)):
        size *= 2
        into = channels * 2 ** (level + 1)
        found += [_moved(into // 2, size, 1.25), _moved(into, size, 2)]  # upsample, pop and concatenate
        found += block(into, into // 4, into // 4, size)
    return [*found, _conv(channels // 2, 1, 1, size)]


def _relu_conv_norm(into: int, out: int, window: int, size: int, before: int | None = None) -> Layer:
    wide = size if before is None else before
    return _moved(into, wide, 2) + _conv(into, out, window, size, before) + _moved(out, size, 3, 2 * out)


def _bottleneck(channels: int, windows: tuple[int, ...], size: int, before: int) -> Layer:
    """Through a quarter of the channels: convolutions of these `windows`, of which the last one changes the size."""
    quarter = channels // 4
    found = _relu_conv_norm(channels, quarter, 1, before)
    for window in windows[:-1]:
        found += _relu_conv_norm(quarter, quarter, window, before)
    return (
        found
        + _relu_conv_norm(quarter, quarter, windows[-1], size, before)
        + _relu_conv_norm(quarter, channels, 1, size)
    )


def _cell(channels: int, before: int, earlier: int, size: int, *, reduces: bool, after_reduction: bool) -> Layer:
    """A cell of so many `channels` behind one of `before`, which is `size` wide, and one of `earlier`."""
    found = _relu_conv_norm(before, channels, 1, size)
    if after_reduction:
        found += _relu_conv_norm(earlier, channels, 1, size, 2 * size)
    elif earlier != channels:
        found += _relu_conv_norm(earlier, channels, 1, size)
    if reduces:
        half = size // 2
        pools = 3 * _wide(channels, half) + 2 * 2 * channels * half * half
        found += Layer(0.0, 4.0 * pools)
        found += _bottleneck(channels, (9,), half, size) + _bottleneck(channels, (7, 7), half, half)
        found += _relu_conv_norm(channels, channels, 1, half)
        return found + _moved(channels, half, 5 * 3 + 2 * 3)  # sums of two, and three of them beside each other
    found += _moved(channels, size, 3 * 2)  # pools
    found += _bottleneck(channels, (7, 7), size, size) + _bottleneck(channels, (7, 7), size, size)
    for _ in range(3):
        found += _relu_conv_norm(channels, channels, 1, size)
    return found + _moved(channels, size, 5 * 3 + 2 * 4)


def _wide(channels: int, half: int) -> float:
    """Elements that a pool reads and writes which halves the size."""
    return channels * half * half * 5.0


def amoebanet(layers: int = 18, filters: int = 256, classes: int = 1000, size: int = 224) -> list[Layer]:
    """The layers of AmoebaNet-D (`layers`, `filters`): stem, cells and classifier, in order."""
    channels = before = earlier = filters // 4
    size, after_reduction = size // 2, False
    found = [_relu_conv_norm(3, channels, 9, size, 2 * size)]
    for reduces in [
        True,
        True,
        *[False] * (layers // 3),
        True,
        *[False] * (layers // 3),
        True,
        *[False] * (layers // 3),
    ]:
        channels *= 2 if reduces else 1
        found.append(_cell(channels, before, earlier, size, reduces=reduces, after_reduction=after_reduction))
        size //= 2 if reduces else 1
        earlier, before, after_reduction = before, channels * (3 if reduces else 4), reduces
    return [*found, Layer(2.0 * before * classes, 4.0 * before * size * size, before * classes + classes)]
