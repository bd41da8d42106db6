"""Checks, by digests, that all ranks hold the same parameters, bit for bit.

State in shards needs no look: each piece of it has one owner, and what it leads to are parameters.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from overlap.core.bucket import Slot
from overlap.core.feature import Feature
from overlap.core.gathering import Transit
from overlap.core.participants import Participants
from overlap.features.hyper_parameters import named
from overlap.transport.broadcast import is_plain

__all__ = [
    "EarlyReplicaCheck",
    "ReplicaCheck",
    "difference",
    "digest_of",
    "digests_of",
    "final_parameters",
    "named_parameters_of",
    "parameters_of",
    "together",
]

_DIGEST_BYTES = 16
_SHORT = 7  # bytes of a digest that the tally has room for

Parameters = Callable[[], Mapping[str, torch.Tensor]]


class ReplicaCheck(Feature):
    """Compares parameters in every `every`-th round, in ``step()``, before anything is updated.

    Args:
        parameters: gives them by name, final values.
        rounds: counts rounds alike on all ranks.
    """

    def __init__(self, every: int, parameters: Parameters, rounds: Participants) -> None:
        self._every, self._parameters, self._rounds = every, parameters, rounds
        self._digests: dict[str, bytes] = {}

    def look(self) -> None:
        """Take digests of the parameters as they are now."""
        self._digests = digests_of(self._parameters()) if self._rounds.round % self._every == 0 else {}

    def digest(self) -> int:
        self.look()
        return int.from_bytes(together(self._digests)[:_SHORT], "big")

    def told(self) -> dict[str, bytes]:
        return self._digests

    def difference(self, told: Mapping[int, Any]) -> str:
        return difference(told)


class EarlyReplicaCheck(ReplicaCheck):
    """A replica check for early updates: it takes parameters before the first bucket is updated."""

    def __init__(self, every: int, parameters: Parameters, rounds: Participants) -> None:
        super().__init__(every, parameters, rounds)
        self._looked = False

    def gradient(self, _slot: Any) -> None:
        if not self._looked:
            self._looked = True
            super().look()

    def look(self) -> None:
        if not self._looked:
            super().look()

    def ended(self) -> None:
        self._looked = False


def parameters_of(model: torch.nn.Module | None) -> dict[str, torch.Tensor]:
    """The parameters of `model` by name, each once.

    No gate hears of it: who watches what is read, or waits for it, is not told.
    """
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for prefix, module in () if model is None else model.named_modules():
        held = module._parameters
        for name, parameter in dict.items(held) if isinstance(held, dict) else held.items():  # none in TorchScript
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                found[f"{prefix}.{name}" if prefix else name] = parameter
    return found


def named_parameters_of(
    model: torch.nn.Module | None, slots: Sequence[Slot], others: Callable[[], Iterable[Slot]] = tuple
) -> Parameters:
    """A function that gives the parameters of `model`, frozen ones too, and those of `slots` that are not in it.

    Not those of which each rank has a share, by this optimizer or by those that have the `others`.
    """

    def parameters() -> dict[str, torch.Tensor]:
        away = {id(slot.param) for slot in (*slots, *others()) if slot.bucket is not None and slot.bucket.freed}
        found = {name: parameter for name, parameter in parameters_of(model).items() if id(parameter) not in away}
        theirs = {id(parameter) for parameter in found.values()} | away
        return found | {slot.name: slot.param for slot in slots if id(slot.param) not in theirs}

    return parameters


def final_parameters(
    parameters: Parameters, transit: Transit, apart: Callable[[], Collection[str]] = tuple
) -> Parameters:
    """A function that waits for `parameters` and gives those that are alike in ``step()``, without those `apart`."""

    def final() -> dict[str, torch.Tensor]:
        transit.arrive_all()
        without = apart()
        return {name: parameter for name, parameter in parameters().items() if name not in without}

    return final


def digest_of(tensor: torch.Tensor) -> bytes:
    """A digest of the tensor's values, shape and type, bit for bit, in whatever order its memory is laid out."""
    found = hashlib.blake2b(f"{tuple(tensor.shape)} {tensor.dtype}".encode(), digest_size=_DIGEST_BYTES)
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    if plain.numel():
        flat = plain.as_strided((plain.numel(),), (1,))  # one element may have any stride
        found.update(flat.view(torch.uint8).numpy().data)
    return found.digest()


def digests_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    """A digest of each tensor, by name.

    Not of those that this process does not hold whole, such as DTensors, nor of those without values yet.
    """
    return {
        name: digest_of(tensor)
        for name, tensor in tensors.items()
        if not is_lazy(tensor) and is_plain(tensor) and tensor.device.type != "meta"
    }


def together(digests: Mapping[str, bytes]) -> bytes:
    """One digest of all digests; zeros for none (pure)."""
    if not digests:
        return bytes(_DIGEST_BYTES)
    parts: Iterable[bytes] = (part for name, digest in digests.items() for part in (name.encode(), digest))
    return hashlib.blake2b(b"\0".join(parts), digest_size=_DIGEST_BYTES).digest()


def difference(told: Mapping[int, Mapping[str, bytes]], kind: str = "parameter") -> str:
    """A message about the first tensor, called `kind`, that differs in what ranks have `told`; else empty (pure)."""
    names = [
        name for name in dict.fromkeys(name for digests in told.values() for name in digests) if _differs(told, name)
    ]
    if not names:
        return ""
    ranks: dict[bytes | None, list[int]] = {}
    for rank, digests in told.items():
        ranks.setdefault(digests.get(names[0]), []).append(rank)
    most, *others = sorted(ranks.values(), key=len, reverse=True)
    more = f", and so do {len(names) - 1} more" if len(names) > 1 else ""
    apart = " and ".join(map(named, others))
    return f"{kind} {names[0]!r} differs between ranks: {apart} and {named(most)} hold different values{more}"


def _differs(told: Mapping[int, Mapping[str, bytes]], name: str) -> bool:
    return len({digests.get(name) for digests in told.values()}) > 1
