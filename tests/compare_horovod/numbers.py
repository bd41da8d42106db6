"""Sightings of calls that both sides answer with numbers, and which: any other number is no documented difference.

They follow from the calls' definitions, by hand or with plain torch, and not from what either side printed.
"""

from __future__ import annotations

import itertools
import math
import re

import torch

from tests.compare_horovod.judgement import Sighting
from tests.compare_horovod.outcome import Outcome

__all__ = ["ALONE", "CLOSURE", "DROPPED", "FP16", "JOIN", "UNUSED", "WARNED"]


def _exactly(value: object) -> str:
    """A pattern for the answer `value`."""
    return re.escape(str(Outcome.of_value(value))) + "$"


def _rounded(value: object) -> str:
    """A pattern for the answer `value`, whose numbers are taken to six decimals; what comes behind them is rounding."""
    texts = re.split(r"(-?\d+\.\d+)", str(Outcome.of_value(value)))
    return "".join(_near(float(text)) if odd % 2 else re.escape(text) for odd, text in enumerate(texts)) + "$"


def _near(number: float) -> str:
    """A pattern for all that is up to half a millionth away from `number`, and nothing that is two away."""
    below = number - math.copysign(1e-6, number)
    return rf"({re.escape(f'{below:.6f}')}|{re.escape(f'{number:.6f}')})\d*"


def _row(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float32)


def _linear(first: float, second: float, bias: float) -> list[torch.Tensor]:
    """Parameters of the model of `calls/optimizer.py`."""
    return [_row(first, second).view(1, 2), _row(bias)]


# Ranks contribute 1, 2, … to one call, and all but rank 0, which has joined, to another, where Horovod sees its zeros.
JOIN = (Sighting("join/Min", _exactly([[_row(1), _row(0)], True]), _exactly([[_row(1), _row(2)], True]), ranks=(2, 4)),)

# What follows is SGD (lr 0.1, weight decay 0.1, momentum 0.9, which a first step does not show) on the model that
# `calls/optimizer.py` creates after manual_seed(0): two weights and a bias.
_CREATED = torch.tensor([-0.0052939812, 0.3793228865, -0.5819807649], dtype=torch.float64)


def _error(scale: float) -> float:
    """What the model makes of inputs at `scale`, where 0 is wanted."""
    first, second, bias = _CREATED.tolist()
    return scale * (first + second) + bias


def _loss(scale: float) -> torch.Tensor:
    return torch.tensor(_error(scale) ** 2)


def _gradient(scale: float) -> torch.Tensor:
    return 2 * _error(scale) * torch.tensor([scale, scale, 1.0], dtype=torch.float64)


def _gradients(ranks: int) -> list[torch.Tensor]:
    """Of ranks with inputs at scale 1, 2, …"""
    return [_gradient(1.0 + rank) for rank in range(ranks)]


def _stepped(gradient: torch.Tensor) -> list[torch.Tensor]:
    return _linear(*(_CREATED - 0.1 * (gradient + 0.1 * _CREATED)).tolist())


def _averaged(ranks: int) -> list[torch.Tensor]:
    return _stepped(sum(_gradients(ranks), torch.zeros(3)) / ranks)


def _closure(ranks: int) -> tuple[Sighting, ...]:
    """Each rank's loss is its own on both sides.

    Horovod's step does not wait for the reductions that the closure has started. The bias is sent first and steps last: now
    and then it steps by what its reduction has come to so far, a sum over some ranks, or by the average.
    """
    gradients = _gradients(ranks)
    some = [each for count in range(1, ranks + 1) for each in itertools.combinations(gradients, count)]
    biases = [_stepped(sum(each, torch.zeros(3)))[1] for each in some] + [_averaged(ranks)[1]]
    return tuple(
        Sighting(
            "optimizer/closure",
            _rounded([loss, [_stepped(own)[0], bias]]),
            _rounded([loss, _averaged(ranks)]),
            ranks=(ranks,),
        )
        for loss, own in zip(map(_loss, range(1, ranks + 1)), gradients, strict=True)
        for bias in biases
    )


CLOSURE = _closure(2) + _closure(4)

# How many warnings there were, and the model after a step by the average of the same gradients.
WARNED = tuple(
    Sighting(
        "optimizer/synchronize without skip_synchronize",
        _rounded([1, _averaged(ranks)]),
        _rounded([0, _averaged(ranks)]),
        ranks=(ranks,),
    )
    for ranks in (1, 2, 4)
)

# Two steps at scales 0.5 + rank and 1.5 + rank, by averages of gradients that were rounded to fp16. Horovod's sums are
# those of MPI's recursive doubling, (0 + 1) + (2 + 3), rounded each time; the bias alone shows it.
FP16 = (
    Sighting(
        "optimizer/compression=fp16",
        _rounded(_linear(-0.044967, 0.328534, -0.536216)),
        _rounded(_linear(-0.044967, 0.328534, -0.536265)),
        ranks=(4,),
    ),
)

ALONE = (
    # The same two steps, by gradients as they are and by those rounded to fp16.
    Sighting(
        "optimizer/compression=fp16",
        _rounded(_linear(0.016481, 0.389983, -0.451215)),
        _rounded(_linear(0.016490, 0.389992, -0.451196)),
        ranks=(1,),
    ),
)

# Dropped gradients leave the model as it was; two passes at scale 1 step by twice the gradient.
DROPPED = (
    Sighting(
        "optimizer/zero_grad before step",
        "AssertionError: optimizer.zero_grad",
        _rounded([None, _linear(*_CREATED.tolist())]),
        ranks=(2, 4),
    ),
    Sighting(
        "optimizer/a pass too many",
        "AssertionError: Gradients were computed more than",
        _rounded([None, _stepped(2 * _gradient(1.0))]),
        ranks=(2, 4),
    ),
)

# Weights with a gradient of 1, and the bias with a gradient of 0 or none: weight decay moves it or not.
UNUSED = (
    Sighting(
        "optimizer/bias unused",
        _rounded([None, _stepped(torch.tensor([1.0, 1.0, 0.0]))]),
        _rounded([None, [_stepped(torch.ones(3))[0], _linear(*_CREATED.tolist())[1]]]),
        ranks=(2, 4),
    ),
)
