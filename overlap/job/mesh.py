"""The layout of a mesh: named axes over the ranks of a job, in row-major order (pure).

data=2 × tensor=3        tensor 0   1   2
                  data 0        0   1   2
                       1        3   4   5
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod
from numbers import Integral
from typing import Any

__all__ = ["Layout", "laid_out"]


@dataclass(frozen=True, slots=True)
class Layout:
    """Axes by name, each with its number of ranks. The last one varies fastest, as in torch's ``init_device_mesh``."""

    axes: tuple[tuple[str, int], ...]

    @property
    def shape(self) -> dict[str, int]:
        """The number of ranks along each axis, in the order of the axes."""
        return dict(self.axes)

    def check(self, names: Collection[str]) -> None:
        """Raise ``ValueError`` for the first of `names` that is none of the axes."""
        for name in names:
            if name not in self.shape:
                raise ValueError(f"the mesh has no axis {name!r}: its axes are {', '.join(self.shape)}")

    def coordinate(self, rank: int) -> dict[str, int]:
        """The place of `rank` along each axis."""
        found = {}
        for name, size in reversed(self.axes):
            rank, found[name] = divmod(rank, size)
        return {name: found[name] for name in self.shape}

    def rank(self, coordinate: Mapping[str, int]) -> int:
        """The rank at `coordinate`, which has all axes."""
        number = 0
        for name, size in self.axes:
            number = number * size + coordinate[name]
        return number

    def along(self, names: Collection[str], rank: int) -> tuple[int, ...]:
        """The ranks that differ from `rank` along the axes `names` alone, itself among them, in ascending order."""
        here = self.coordinate(rank)
        places = [range(size) if name in names else [here[name]] for name, size in self.axes]
        return tuple(self.rank(dict(zip(self.shape, place, strict=True))) for place in product(*places))

    def groups(self, names: Collection[str]) -> list[tuple[int, ...]]:
        """What :meth:`along` gives for any rank, each once, in the order of their first ranks."""
        return list(dict.fromkeys(self.along(names, rank) for rank in range(prod(self.shape.values()))))


def laid_out(axes: Mapping[str, Any], ranks: int) -> Layout:
    """The layout of a job of so many `ranks` along `axes`, of which one may be -1: the rest.

    Raises ``ValueError`` where names are no identifiers, sizes are no numbers of ranks, or their product is another.
    """
    words = " × ".join(f"{name}={size!r}" for name, size in axes.items())
    if not axes:
        raise ValueError(f"a mesh has at least one axis, such as Mesh(data={ranks})")
    for name, size in axes.items():
        if not name.isidentifier():
            raise ValueError(f"the axis {name!r} of the mesh has no name that is an identifier, such as 'data'")
        if not isinstance(size, Integral) or isinstance(size, bool) or (size < 1 and size != -1):
            raise ValueError(f"{name}={size!r} should be a number of ranks, at least 1, or -1 for the rest")
    rest = [name for name, size in axes.items() if size == -1]
    if len(rest) > 1:
        raise ValueError(f"{words}: one axis may be -1, the rest of the job's {ranks} ranks, and {len(rest)} are")
    known = prod(int(size) for size in axes.values() if size != -1)
    if rest and ranks % known:
        raise ValueError(f"{words}: {known} ranks do not divide the job's {ranks}, so {rest[0]} cannot be the rest")
    if not rest and known != ranks:
        raise ValueError(f"{words} {'is 1 rank' if known == 1 else f'are {known} ranks'}, and the job has {ranks}")
    return Layout(tuple((name, ranks // known if size == -1 else int(size)) for name, size in axes.items()))
