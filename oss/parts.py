"""Groups parameters of one owner into runs of bytes that are sent as one message."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

__all__ = ["Part", "narrows", "parts_of"]

_LARGEST = 25 * 2**20  # bytes, unless one parameter is larger


@dataclass(frozen=True)
class Part:
    """Parameters of one owner on one device, sent as one message. With `rounds`, what `narrows` travels as float16."""

    owner: int
    parameters: tuple[torch.Tensor, ...]
    rounds: bool

    def packed(self) -> torch.Tensor:
        """The parameters' bytes, one after the other."""
        flat = [p.detach().contiguous().view(-1).to(_wire(p, self.rounds)) for p in self.parameters]
        return torch.cat([values.view(torch.uint8) for values in flat])

    def room(self) -> torch.Tensor:
        """A receive buffer for the part's bytes."""
        size = sum(_nbytes(parameter, self.rounds) for parameter in self.parameters)
        return torch.empty(size, dtype=torch.uint8, device=self.parameters[0].device)

    @torch.no_grad()
    def unpack(self, buffer: torch.Tensor) -> None:
        """Overwrite the parameters."""
        sizes = [_nbytes(parameter, self.rounds) for parameter in self.parameters]
        for parameter, values in zip(self.parameters, buffer.split(sizes), strict=True):
            parameter.copy_(values.view(_wire(parameter, self.rounds)).view(parameter.shape))


def parts_of(parameters: Iterable[torch.Tensor], owners: Mapping[torch.Tensor, int], rounds: bool) -> list[Part]:
    """All parts in the order of sending, the same on every rank: every owner's first part, then every second part, …"""
    lists: dict[tuple[int, torch.device], list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.numel():
            lists.setdefault((owners[parameter], parameter.device), []).append(parameter)
    numbered = []
    for (owner, _), those in lists.items():
        # Wide types first: whatever follows a value lies at a multiple of its own size then.
        those.sort(key=lambda parameter: -_wire(parameter, rounds).itemsize)
        pieces = _cut(those, [_nbytes(parameter, rounds) for parameter in those])
        numbered += [(number, owner, piece) for number, piece in enumerate(pieces)]
    numbered.sort(key=lambda entry: entry[:2])
    return [Part(owner, piece, rounds) for _, owner, piece in numbered]


def narrows(parameter: torch.Tensor) -> bool:
    return parameter.dtype in (torch.float32, torch.float64)


def _wire(parameter: torch.Tensor, rounds: bool) -> torch.dtype:
    return torch.float16 if rounds and narrows(parameter) else parameter.dtype


def _nbytes(parameter: torch.Tensor, rounds: bool) -> int:
    return parameter.numel() * _wire(parameter, rounds).itemsize


def _cut(parameters: Sequence[torch.Tensor], sizes: Sequence[int]) -> list[tuple[torch.Tensor, ...]]:
    """In order, into pieces of at most ``_LARGEST`` bytes, a larger parameter into one of its own."""
    pieces: list[list[torch.Tensor]] = []
    filled = _LARGEST
    for parameter, size in zip(parameters, sizes, strict=True):
        if filled + size > _LARGEST:
            pieces.append([])
            filled = 0
        pieces[-1].append(parameter)
        filled += size
    return [tuple(piece) for piece in pieces]
