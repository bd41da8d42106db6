"""Compares the hyper-parameters of the user's optimizer between ranks in every step; each rank's script sets them.

A scheduler that one rank alone steps, or a rate that follows one rank's loss, would train every rank, or every shard,
differently, without a word. A digest of the values rides in the tally of ``step()``: no message, and no pass over data.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from numbers import Real
from operator import is_
from typing import Any

import torch

from overlap.core.feature import Feature

__all__ = ["HyperParameters", "difference", "named", "shown", "spread"]

_FEW = 64  # elements: a tensor with more is no hyper-parameter
_EXACT = 2**53  # whole numbers up to this are floats, too
_DIGEST_BYTES = 7
_HOW = frozenset(("params", "foreach", "fused", "capturable", "differentiable"))
_FINAL = frozenset((float, int, bool, str, type(None)))

Told = list[dict[str, str]]  # of each group, its values by name


class HyperParameters(Feature):
    """Compares what `optimizer` declares in ``defaults``, and ``lr``, of each of its groups.

    Numbers, texts, None, and tuples, lists and dictionaries of these; tensors with few elements, if they are on the CPU:
    reading another waits for its device. Anything else stays with its rank, and what a script adds to a group is its own.
    Not how an update is computed (`foreach`, `fused`), which changes no result but for rounding.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._names = sorted({*optimizer.defaults, "lr"} - _HOW)
        self._kept: list[list[Any]] = []  # of each group, as they were when …
        self._digest: int | None = None  # … this was made; None: they may change where they are

    def _now(self) -> list[list[Any]]:
        names = self._names
        return [[group.get(name) for name in names] for group in self._optimizer.param_groups]

    def digest(self) -> int:
        now, kept = self._now(), self._kept
        if (
            self._digest is not None
            and len(now) == len(kept)
            and all(all(map(is_, *pair)) for pair in zip(now, kept, strict=True))
        ):
            return self._digest
        text = repr([[shown(value) for value in values] for values in now]).encode()
        found = int.from_bytes(hashlib.blake2b(text, digest_size=_DIGEST_BYTES).digest(), "big")
        self._kept, self._digest = now, found if all(_final(value) for values in now for value in values) else None
        return found

    def told(self) -> Told:
        return [dict(zip(self._names, map(shown, values), strict=True)) for values in self._now()]

    def difference(self, told: Mapping[int, Told]) -> str:
        return difference(told)


def _final(value: Any) -> bool:
    return type(value) in _FINAL or (type(value) is tuple and all(type(part) in _FINAL for part in value))


def shown(value: Any) -> str:
    """A value as text, the same for equal values on every rank; empty for values that are not compared (pure)."""
    if isinstance(value, torch.Tensor):
        few = value.device.type == "cpu" and value.layout is torch.strided and value.numel() <= _FEW
        return shown(value.tolist()) if few else ""
    if value is None or isinstance(value, bool | str):
        return repr(value)
    if isinstance(value, Real):
        return repr(value) if isinstance(value, int) and abs(value) > _EXACT else repr(float(value) + 0.0)
    if isinstance(value, tuple | list):
        return f"({', '.join(map(shown, value))})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{key}: {shown(part)}' for key, part in value.items()))}}}"
    return ""


def difference(told: Mapping[int, Told]) -> str:
    """The message to raise where ranks' groups differ; empty where they do not (pure)."""
    counts = {rank: str(len(groups)) for rank, groups in told.items()}
    if len(set(counts.values())) > 1:
        return f"the number of parameter groups is {spread(counts)}: call add_param_group() on every rank alike"
    for number, groups in enumerate(zip(*told.values(), strict=True)):
        for name in sorted({name for group in groups for name in group}):
            values = dict(zip(told, (group.get(name, "") for group in groups), strict=True))
            if len(set(values.values())) > 1:
                return (
                    f"{name!r} of parameter group {number} is {spread(values)}: every rank has to step with the same "
                    "hyper-parameters. Set them from what all ranks know, such as a loss averaged by allreduce(), and "
                    "step schedulers on every rank"
                )
    return ""


def spread(values: Mapping[int, str]) -> str:
    """Which ranks have which value, as text (pure)."""
    ranks: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    return " and ".join(f"{value or 'something else'} on {named(those)}" for value, those in ranks.items())


def named(ranks: Sequence[int]) -> str:
    """The ranks as text (pure)."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {list(ranks)}"
